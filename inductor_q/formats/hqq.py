"""HQQ's integers: `(code - zero_point) * scale`, in the 16-bit dtype that it computes in.

The difference is rounded to that dtype, which zero points and scales have too, so a value in it is
bitwise HQQ's. Zero points are no integers. Groups run on from row to row, as HQQ makes them along
axis 1. Codes of 2 and 3 bits lie in bit planes.
"""

from __future__ import annotations

from inductor_q.formats.codec import Number, RoundedAffine
from inductor_q.formats.packing import BitPlanes, BytePacking
from inductor_q.formats.quant_format import QuantFormat
from inductor_q.formats.scale import BlockScale

#: The groups that a format has, by how many bits a code has. A multiple of one repeats its scales.
HQQ_GROUPS = {2: (16, 64), 3: (64,), 4: (64,), 8: (64,)}

HQQ_FORMATS = tuple(
    QuantFormat(
        name=f"hqq{bits}_g{group}_{short}",
        packing=BitPlanes(bits) if bits in (2, 3) else BytePacking(bits),
        codec=RoundedAffine(dtype),
        shared=tuple(BlockScale(of, group, Number((dtype,))) for of in ("scale", "zero_point")),
    )
    for bits, groups in HQQ_GROUPS.items()
    for group in groups
    for dtype, short in (("bfloat16", "bf16"), ("float16", "fp16"))
)
