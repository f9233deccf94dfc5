"""8-bit floating-point numbers with a scale per row, or one for the weight: `number * scale`."""

from __future__ import annotations

from inductor_q.formats.minifloat import E4M3, E5M2
from inductor_q.formats.packing import BytePacking
from inductor_q.formats.quant_format import QuantFormat
from inductor_q.formats.scale import RowScale, TensorScale

FP8_FORMATS = tuple(
    QuantFormat(
        name=f"fp8_{number.name}_{of}",
        packing=BytePacking(bits=8),
        codec=number,
        shared=(scale("scale"),),
    )
    for number in (E4M3, E5M2)
    for of, scale in (("row", RowScale), ("tensor", TensorScale))
)
