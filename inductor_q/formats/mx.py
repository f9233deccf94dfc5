"""Block-scaled numbers: MXFP4 and MXFP8 (OCP Microscaling formats, version 1.0), NVIDIA's NVFP4.

`number * scale` with blocks along a row. MX formats have a power of two, E8M0, per 32 elements, and
E2M1, E4M3 or E5M2 numbers; NVFP4 has E2M1 numbers and an E4M3 number per 16 of them, times a
float32 number for the whole tensor. `nvfp4_rows` has that number for each row, as a stack of
experts needs that were quantized one by one; `nvfp4_divided_rows` divides by it, as
compressed-tensors does. The first element of a pair lies in the low nibble. Scales are stored row
by row; those of `nvfp4_tiles` lie in the order in which tensor cores read them.
"""

from __future__ import annotations

from inductor_q.formats.codec import Codebook, Number
from inductor_q.formats.layout import ROW_MAJOR, Grid, Tiles128x4
from inductor_q.formats.minifloat import E4M3, E5M2, E8M0
from inductor_q.formats.packing import BytePacking
from inductor_q.formats.quant_format import QuantFormat
from inductor_q.formats.scale import (
    GroupScale,
    ProductScale,
    QuotientScale,
    RowScale,
    TensorScale,
)

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

#: `minifloat.E2M1` as a table, which kernels look up.
E2M1_VALUES = Codebook((*_MAGNITUDES, *(-x for x in _MAGNITUDES)))


def _nvfp4(
    name: str, layout: Grid, whole_of: type[TensorScale] | type[RowScale] = TensorScale
) -> QuantFormat:
    blocks = GroupScale("scale", 16, E4M3, layout)
    whole = whole_of("global_scale", Number(("float32",)))
    return QuantFormat(name, BytePacking(bits=4), E2M1_VALUES, (ProductScale(blocks, whole),))


_DIVIDED = QuotientScale(
    GroupScale("scale", 16, E4M3), RowScale("global_divisor", Number(("float32",)))
)


MX_FORMATS = (
    QuantFormat("mxfp4", BytePacking(bits=4), E2M1_VALUES, (GroupScale("scale", 32, E8M0),)),
    *(
        QuantFormat(
            f"mxfp8_{number.name}", BytePacking(bits=8), number, (GroupScale("scale", 32, E8M0),)
        )
        for number in (E4M3, E5M2)
    ),
    _nvfp4("nvfp4", ROW_MAJOR),
    _nvfp4("nvfp4_rows", ROW_MAJOR, RowScale),
    QuantFormat("nvfp4_divided_rows", BytePacking(bits=4), E2M1_VALUES, (_DIVIDED,)),
    _nvfp4("nvfp4_tiles", Tiles128x4()),
)
