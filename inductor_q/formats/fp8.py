"""8-bit floating-point numbers with a scale per row: `number * scale`."""

from __future__ import annotations

from inductor_q.formats.minifloat import E4M3
from inductor_q.formats.packing import BytePacking
from inductor_q.formats.quant_format import QuantFormat
from inductor_q.formats.scale import RowScale

FP8_FORMATS = (
    QuantFormat(
        name="fp8_e4m3_row",
        packing=BytePacking(bits=8),
        codec=E4M3,
        shared=(RowScale("scale"),),
    ),
)
