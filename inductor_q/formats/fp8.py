"""8-bit floating-point numbers, `number * scale`: with a scale per row, tile or weight.

Tiles of 128 rows and columns are DeepSeek-V3's (arXiv 2412.19437, section 3.3).
"""

from __future__ import annotations

from inductor_q.formats.minifloat import E4M3, E5M2
from inductor_q.formats.packing import BytePacking
from inductor_q.formats.quant_format import QuantFormat
from inductor_q.formats.scale import RowScale, TensorScale, TileScale

FP8_FORMATS = (
    *(
        QuantFormat(
            name=f"fp8_{number.name}_{of}",
            packing=BytePacking(bits=8),
            codec=number,
            shared=(scale("scale"),),
        )
        for number in (E4M3, E5M2)
        for of, scale in (("row", RowScale), ("tensor", TensorScale))
    ),
    QuantFormat(
        name="fp8_e4m3_128x128",
        packing=BytePacking(bits=8),
        codec=E4M3,
        shared=(TileScale("scale", 128, 128),),
    ),
)
