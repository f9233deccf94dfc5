"""Integers with a scale and a zero point, per group of a row, per row, or for the whole weight.

`(code - zero_point) * scale`: a code of 4 bits is unsigned and has a zero point from 0 to 255; one
of 8 bits is signed, and so is its zero point. The first element of a pair lies in the low nibble.

`number * scale + zero_point`: the zero point of `int4_plain` and `int4_tiles` is a value. Numbers
are from -8 to 7: in two's complement, or 8 more in the layout of torch's tensor-core kernel.
There scale and zero point lie side by side, and groups are padded as the columns are.
"""

from __future__ import annotations

from inductor_q.formats.codec import Affine, Number, Shifted
from inductor_q.formats.layout import ByColumns
from inductor_q.formats.packing import BytePacking, MmaTiles
from inductor_q.formats.quant_format import QuantFormat
from inductor_q.formats.scale import GroupScale, RowScale, TensorScale

#: The groups of which libraries write weights, by how many bits a code has.
GROUPS = {4: (32, 64, 128), 8: (32, 64, 128, 256)}
SHIFTED_GROUPS = (32, 64, 128, 256)

_UINT8, _INT8 = Number(("uint8",)), Number(("int8",))


def _int8(of: str, scale: type[RowScale] | type[TensorScale]) -> QuantFormat:
    shared = (scale("scale"), scale("zero_point", _INT8))
    return QuantFormat(f"int8_{of}", BytePacking(bits=8), Affine(signed_bits=8), shared)


def _tiles(group: int) -> QuantFormat:
    pairs = (ByColumns(parts=2, part=n, multiples=(8, 1024 // group)) for n in (0, 1))
    shared = tuple(GroupScale("scale_and_zero", group, layout=layout) for layout in pairs)
    return QuantFormat(f"int4_tiles_g{group}", MmaTiles(), Shifted(is_offset=True), shared)


INTX_FORMATS = (
    *(
        QuantFormat(
            name=f"int{bits}_g{group}",
            packing=BytePacking(bits=bits),
            codec=Affine(signed_bits=8 if bits == 8 else 0),
            shared=(
                GroupScale("scale", group),
                GroupScale("zero_point", group, _INT8 if bits == 8 else _UINT8),
            ),
        )
        for bits, groups in GROUPS.items()
        for group in groups
    ),
    _int8("row", RowScale),
    _int8("tensor", TensorScale),
    *(
        QuantFormat(
            name=f"int4_plain_g{group}",
            packing=BytePacking(bits=4),
            codec=Shifted(is_offset=False),
            shared=(GroupScale("scale", group), GroupScale("zero_point", group)),
        )
        for group in SHIFTED_GROUPS
    ),
    *(_tiles(group) for group in SHIFTED_GROUPS),
)
