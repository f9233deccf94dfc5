"""Cast rows to FP8 and add adapters by Triton on CPU tensors, with TRITON_INTERPRET=1.

This is a program of its own, because Triton decides at import whether it interprets. It prints how
many cases there were. The interpreter forgets the carry where a number is rounded up to a power of
two in e4m3, and truncates to bfloat16: such numbers are left out, and sums are in float16.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from inductor_q.kernels import expert_fp8_triton
from inductor_q.kernels.rounding import cast_rows
from tests.support.moe import Sizes, layer

SIZES = (
    Sizes(experts=2, tokens=3),
    Sizes(in_features=320, out_features=144, tokens=5, top_k=3, rank=5),
)
E4M3 = torch.float8_e4m3fn


def main() -> int:
    count = 0
    for sizes, grouped, transposed in itertools.product(SIZES, [False, True], [False, True]):
        case = layer(
            sizes,
            dtype=torch.bfloat16,
            grouped=(grouped, True),
            sentinel=-1,
            transposed=transposed,
        )
        experts, rows, _ = case.shape
        scale = torch.rand(experts * rows, generator=torch.Generator().manual_seed(1)) + 0.5
        call = replace(case.call(), row_scale=scale)
        offsets = case.routing.offsets.tolist()
        x = case.x if grouped else case.x[case.routing.order // case.routing.top_k]
        codes, of_rows = expert_fp8_triton.cast_rows(call, case.x)
        y = torch.randn(len(x), call.out_features).half()
        scaled = torch.randn(len(x), 16).half()
        expected = y.float()
        for e in range(experts):
            own = slice(offsets[e], offsets[e + 1])
            factor = scale.view(experts, rows)[e] if transposed else None
            exact, exact_scale = cast_rows(x[own], E4M3, factor)
            torch.testing.assert_close(of_rows[own, None], exact_scale, rtol=1e-6, atol=0)
            # A number half way between two may go to the other one.
            kept = exact.float().frexp().mantissa.abs() != 0.5
            mine, theirs = codes[own].float()[kept], exact.float()[kept]
            assert (mine != theirs).sum() <= 2 + kept.sum() // 100
            torch.testing.assert_close(mine, theirs, rtol=0.13, atol=2**-9)
            assert case.lora_b is not None
            expected[own] += scaled[own, : sizes.rank].float() @ case.lora_b[e].float().t()
        before = y.clone()
        expert_fp8_triton.add_adapter(call, y, scaled)
        torch.testing.assert_close(y, expected.half(), rtol=2**-9, atol=2e-3)
        assert torch.equal(y[offsets[-1] :], before[offsets[-1] :])  # nobody's
        count += 1
    return count


if __name__ == "__main__":
    print(main())
