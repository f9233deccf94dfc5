"""Run the Triton kernel of few rows on CPU tensors, with TRITON_INTERPRET=1.

This is a program of its own, because Triton decides at import whether it interprets. It prints how
many calls had results within a rounding of float16 from those in float64, which did not depend on
another row; all together are as near as decoding and a product in float16. The interpreter
truncates to bfloat16 where a GPU rounds; the gpu tests have that dtype. Names on the command line
choose formats.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from inductor_q.formats import FORMATS
from inductor_q.kernels import linear_rows_reference, linear_rows_triton
from inductor_q.kernels.linear_rows_tiles import Tile
from tests.support.few_rows import error, made
from tests.support.processes import asked_for

#: One of each way to pack, kind of scale and codec.
FAMILIES = (
    *("nf4_b64_nested", "fp4_b32", "kbit2_fp16", "kbit3_e4m4", "kbit4_e4m4", "kbit5_e4m4"),
    *("int4_g128", "int4_plain_g32", "int4_tiles_g32", "int8_g32", "int8_row", "int8_tensor"),
    *("int8_absmax", "fp8_e4m3_row", "fp8_e5m2_tensor", "fp8_e4m3_128x128", "mxfp4", "mxfp8_e4m3"),
    *(
        "nvfp4",
        "nvfp4_divided_rows",
        "nvfp4_tiles",
        "nf4_tensor_b64",
        "hqq4_g64_bf16",
        "hqq3_g64_fp16",
    ),
)
ROWS = (1, 3, 16, 17, 64)
#: The ends of tiles; whole tiles; rows that are no whole units; more columns than a scale has.
SHAPES = ((24, 96), (16, 128), (7, 35), (8, 160))
EPS = torch.finfo(torch.float16).eps
MINE: list[float] = []
THEIRS: list[float] = []
SUM, PRODUCT = Tile(16, 128, 4, 1, is_sum=True), Tile(16, 64, 4, 1)


def families() -> int:
    cases = 0
    for name, rows in itertools.product(asked_for(FAMILIES), ROWS):
        shape = SHAPES[cases % len(SHAPES)]
        cases += check(name, shape, rows, split=1 + cases % 2, ranks=((0,), (0,), (1,))[cases % 3])
    return cases


def every_format() -> int:
    return sum(check(name, (16, 64), 2) for name in asked_for(FORMATS))


def several() -> int:
    """Weights of one input, with adapters and biases on some, gated or not."""
    cases = 0
    for ranks, rows, split in itertools.product(((2, 0, 17), (5, 3), (0, 3)), (1, 5), (1, 2)):
        for gated in (False, True) if len(ranks) == 2 else (False,):
            for name in ("nf4_b64_nested", "kbit3_e4m4"):
                cases += check(name, (24, 96), rows, split=split, ranks=ranks, gated=gated)
    return cases


def check(
    name: str,
    shape: tuple[int, int],
    rows: int,
    *,
    split: int = 1,
    ranks: tuple[int, ...] = (0,),
    gated: bool = False,
) -> int:
    call, exact = made(
        FORMATS[name],
        shape,
        rows,
        torch.float16,
        bias=rows % 2 == 1,
        ranks=ranks,
        adapter=torch.float32 if rows == 5 else None,
        gated=gated,
    )
    assert not linear_rows_triton.unfit(call)
    plan = linear_rows_triton.Plan(call, SUM if rows == 1 else PRODUCT, split)
    found, plain = plan(call), linear_rows_reference.KERNEL.run(call)
    others = call.x.clone()
    others[1:] = 0
    first = plan(replace(call, x=others)) if rows in (3, 17) else found
    for i, result in enumerate(exact):
        mine = error(found[i], result)
        assert mine <= EPS, (name, shape, rows, split, ranks, gated, mine)
        MINE.append(mine)
        THEIRS.append(error(plain[i], result))
        assert torch.equal(first[i][0], found[i][0]), (name, shape, rows)
    return 1


if __name__ == "__main__":
    print(families(), every_format(), several())
    assert sum(MINE) <= sum(THEIRS), (sum(MINE), sum(THEIRS))
