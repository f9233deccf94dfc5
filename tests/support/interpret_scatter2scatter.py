"""Run the Triton kernels of scatter2scatter on CPU tensors, with TRITON_INTERPRET=1.

This is a program of its own, because Triton decides at import whether it interprets. Each case is a
layer whose output and gradients are held against a float64 loop over its experts: each within a
rounding of float16, all together as near as the loop in float16. It prints how many cases there
were. The interpreter truncates to bfloat16 where a GPU rounds; the gpu tests have that dtype. Where
the interpreter cannot loop, as Triton 3.6's with NumPy 2.4, the program says so.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inductor_q import kernels, ops
from inductor_q.kernels import (
    expert_rows_triton,
    expert_scales_triton,
    grouped_gram_triton,
    scatter2scatter_triton,
    tile_map_triton,
    tiles,
)
from inductor_q.kernels.calls import DENSE
from inductor_q.kernels.expert_calls import Scatter2Scatter, TileMap
from inductor_q.kernels.tile_map import WIDTH_STEP, height
from inductor_q.kernels.tile_map_reference import reference
from inductor_q.ops.routing import route
from inductor_q.testing import relative_error
from tests.support import ptx
from tests.support.moe import (
    GROUPED,
    Layer,
    Sizes,
    assert_experts_alone_have_the_same_gram,
    gram,
    layer,
    results,
)

#: An A100, and a Turing card: what does not fit there is cut smaller.
A100, TURING = tiles.Limits((8, 0), 166_912), tiles.Limits((7, 5), 65_536)
CANNOT_LOOP = "this Triton's interpreter cannot loop with this NumPy"
EPS = torch.finfo(torch.float16).eps
FIT = Sizes(experts=4, in_features=64, out_features=64, tokens=9, top_k=2, rank=4)
SHAPES = {
    "small": FIT,
    "ends of tiles": replace(FIT, in_features=96, out_features=160),
    "odd": replace(FIT, experts=3, in_features=32, out_features=33, tokens=7, rank=3),
    "one expert": Sizes(1, 64, 32, 40, 1, 17),
    "all experts": Sizes(4, 32, 64, 5, 4, 2),
    "one token": Sizes(5, 64, 32, 1, 2, 8),
    "empty experts": Sizes(40, 64, 32, 3, 2, 4),
    "no adapter": FIT,
    "many rows": Sizes(2, 64, 64, 150, 2, 4),
}
#: nf4 with a scale for every 64, nested, is what the other cases have.
FORMATS = (("nf4", False, 64), ("nf4", True, 32), ("fp4", False, 128), ("fp4", True, 4096))
#: Codes of a byte each: a scale for a tile, a row, 32 of a row.
BYTES = ("fp8_e4m3_128x128", "fp8_e5m2_row", "int8_absmax", "mxfp8_e4m3", "mxfp8_e5m2")


class Interpreted(scatter2scatter_triton.Triton):
    """Run the kernel without its check for a GPU."""

    def refuses(self, call: Scatter2Scatter) -> str:
        return self.unknown(call.fmt) or scatter2scatter_triton.unfit(call)


def cases() -> Iterator[Layer]:
    for i, (name, sizes) in enumerate(SHAPES.items()):
        yield make(sizes, lora=name != "no adapter", gates=i % 2 == 0, bias=i % 3 == 0)
    for form, transposed in itertools.product(GROUPED, [False, True]):
        yield make(grouped=form, transposed=transposed, gates=True, bias=True, sentinel=-1)
        yield make(grouped=form, transposed=transposed, quant=DENSE, sentinel=4)
    for quant, nested, blocksize in FORMATS:
        yield make(quant=quant, nested=nested, blocksize=blocksize, adapter=torch.float32)
    for quant, transposed in (("mxfp4", False), ("nvfp4_rows", True)):
        yield make(quant=quant, transposed=transposed, bias=True)
    tiled = replace(FIT, in_features=256, out_features=128)
    for quant, transposed in itertools.product(BYTES, [False, True]):
        yield make(tiled, quant=quant, transposed=transposed, bias=True)


def make(sizes: Sizes = FIT, **kwargs: Any) -> Layer:
    kwargs = {"grouped": (False, True), **kwargs}
    return layer(sizes, dtype=torch.float16, **kwargs)


def errors(case: Layer, y: Tensor, truth: dict[str, Tensor]) -> dict[str, float]:
    """Return squared errors relative to the truth's norm; absolute where the truth is zero."""
    return {
        name: float((value.double() - truth[name]).square().sum())
        / (float(truth[name].square().sum()) or 1.0)
        for name, value in results(case, y).items()
    }


@triton.jit
def loop(n):  # type: ignore[no-untyped-def]
    for _ in range(n):
        pass


def check_tile_maps() -> None:
    """Compare tile maps with the reference's up to the last part.

    Nothing is written behind the map, whatever the offsets are.
    """
    for tokens, experts in ((0, 3), (1, 1), (9, 5), (300, 5), (700, 3), (40, 200)):
        offsets = route(torch.randint(-1, experts, (tokens, 2)), experts).offsets
        compare_tile_maps(offsets, 2 * tokens)
    compare_tile_maps(torch.tensor([0, 4000], dtype=torch.int32), 4)
    compare_tile_maps(torch.tensor([0, 900, 2000], dtype=torch.int32), 64)


def compare_tile_maps(offsets: Tensor, rows: int) -> None:
    expected, experts = reference(offsets, rows), len(offsets) - 1
    memory = offsets.new_full((64 + len(expected), 4), -7)
    sizes = {
        "HEIGHT": height(rows, experts, offsets.device),
        "STEP": WIDTH_STEP,
        "EXPERTS": triton.next_power_of_2(experts),
    }
    expert_rows_triton.tile_map[(experts,)](offsets, memory, experts, len(expected) - 1, **sizes)
    parts = 1 + int(expected[0, 0])
    assert parts <= len(expected), (offsets, rows)
    for got in (memory, tile_map_triton.KERNEL.run(TileMap(offsets, rows))):
        assert int(got[0, 0]) == parts - 1, (offsets, rows)
        assert torch.equal(got[1:parts], expected[1:parts]), (offsets, rows)
    assert (memory[len(expected) :] == -7).all(), (offsets, rows)


def check_scales() -> None:
    """Compare scales as two bfloat16 with the same in float32; powers of two are one exactly.

    The interpreter truncates to bfloat16, so that two of them leave 2^-14 at most.
    """
    for quant, group in (("nf4", 64), ("mxfp4", 32), ("nvfp4_rows", 16), ("mxfp4", 16)):
        call = make(replace(FIT, in_features=96, out_features=80), quant=quant).call()
        if quant == "nf4":
            call = make(replace(FIT, in_features=128, out_features=80)).call()
        whole, parts = (
            expert_scales_triton.ExpandScales(call, group, 0.75, pairs=pairs)(call)
            for pairs in (False, True)
        )
        some = call.offsets.diff() > 0
        high, low = ((parts >> shift << 16).view(torch.float32)[some] for shift in (0, 16))
        error = (high + low - whole[some]).abs()
        assert whole[some].all() and (error <= whole[some].abs() * 2**-14).all(), quant
        assert quant != "mxfp4" or not low.any()
        numbers = ops.dequantize(call.operands, call.format, call.shape, torch.float32)
        largest = numbers.unflatten(2, (-1, group)).abs().amax(3).transpose(1, 2)
        most = call.fmt.largest if call.fmt else 0
        assert (largest[some] * 0.75 <= whole[some].abs() * most * 1.01).all(), quant


def check_grams() -> None:
    """Compare grams with the reference's in float32, and bit by bit with each expert's alone."""
    case = make(replace(FIT, tokens=100))
    for columns, grouped in itertools.product(((160, 5), (48, 64)), GROUPED):
        call = gram(case, *columns, grouped)
        got = grouped_gram_triton.KERNEL.run(replace(call, dtype=torch.float32))
        wide = replace(call, left=call.left.double(), right=call.right.double())
        truth = kernels.PROVIDERS["grouped_gram"]["cpu"][0].run(replace(wide, dtype=torch.float64))
        assert relative_error(got, truth) < 1e-6, (columns, grouped)
        assert_experts_alone_have_the_same_gram(grouped_gram_triton.KERNEL, call)


def main() -> int:
    try:
        loop[(1,)](2)
    except triton.runtime.errors.InterpreterError as failed:
        sys.exit(f"{CANNOT_LOOP}: {failed}")
    check_tile_maps()
    check_scales()
    check_grams()
    tl.inline_asm_elementwise = ptx.elementwise
    kernels.PROVIDERS["scatter2scatter"]["cpu"] = (Interpreted(),)
    kernels.PROVIDERS["grouped_gram"]["cpu"] = (
        grouped_gram_triton.KERNEL,
        *kernels.PROVIDERS["grouped_gram"]["cpu"],
    )
    ours: dict[str, float] = defaultdict(float)
    peer: dict[str, float] = defaultdict(float)
    count = 0
    for case, device in itertools.product(cases(), (A100, TURING)):
        if device is TURING and count % 4:  # some of them
            continue
        tiles.limits = lambda _, device=device: device  # type: ignore[assignment, misc]
        exact = case.double()
        truth = results(exact, exact.loop())
        for total, y in ((ours, case(provider="triton")), (peer, case.loop())):
            for name, error in errors(case, y, truth).items():
                assert error <= EPS**2, (case, name, error**0.5)
                total[name] += error
        count += 1
    assert all(ours[name] <= 1.25**2 * peer[name] for name in peer), (ours, peer)
    return count


if __name__ == "__main__":
    print(main())
