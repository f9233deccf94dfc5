"""Unsigned integers with a scale and a zero point per group: `(code - zero_point) * scale`.

Groups run along a row; the first element of a pair lies in the low nibble. A zero point is any
number from 0 to 255, in one byte.
"""

from __future__ import annotations

from inductor_q.formats.codec import Affine, Number
from inductor_q.formats.packing import BytePacking
from inductor_q.formats.quant_format import QuantFormat
from inductor_q.formats.scale import GroupScale

GROUPS = (128,)

INTX_FORMATS = tuple(
    QuantFormat(
        name=f"int4_g{group}",
        packing=BytePacking(bits=4),
        codec=Affine(),
        shared=(GroupScale("scale", group), GroupScale("zero_point", group, Number(("uint8",)))),
    )
    for group in GROUPS
)
