"""Block-scaled E2M1 numbers: MXFP4 (OCP Microscaling formats, version 1.0) and NVIDIA's NVFP4.

`number * scale` with blocks along a row. MXFP4 has a power of two, E8M0, per 32 elements; NVFP4 an
E4M3 number per 16 elements times a float32 number for the whole tensor. The first element of a pair
lies in the low nibble. Scales are stored row by row here; `layout.Tiles128x4` is the order in which
tensor cores read them.
"""

from __future__ import annotations

from inductor_q.formats.codec import Codebook, Number
from inductor_q.formats.minifloat import E4M3, E8M0
from inductor_q.formats.packing import BytePacking
from inductor_q.formats.quant_format import QuantFormat
from inductor_q.formats.scale import GroupScale, ProductScale, TensorScale

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

#: `minifloat.E2M1` as a table, which kernels look up.
E2M1_VALUES = Codebook((*_MAGNITUDES, *(-x for x in _MAGNITUDES)))

MX_FORMATS = (
    QuantFormat(
        name="mxfp4",
        packing=BytePacking(bits=4),
        codec=E2M1_VALUES,
        shared=(GroupScale("scale", 32, E8M0),),
    ),
    QuantFormat(
        name="nvfp4",
        packing=BytePacking(bits=4),
        codec=E2M1_VALUES,
        shared=(
            ProductScale(
                GroupScale("scale", 16, E4M3), TensorScale("global_scale", Number(("float32",)))
            ),
        ),
    ),
)
