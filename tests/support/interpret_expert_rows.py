"""Run rows in grouped order by Triton on CPU tensors, with TRITON_INTERPRET=1.

This is a program of its own, because Triton decides at import whether it interprets. It prints how
many cases there were.
"""

from __future__ import annotations

import itertools

import torch

from inductor_q.kernels import expert_rows_triton
from tests.support.moe import Sizes, layer

SIZES = (Sizes(), Sizes(in_features=320, tokens=13, top_k=3), Sizes(in_features=8, tokens=1))


def main() -> int:
    count = 0
    for sizes, grouped, pitch in itertools.product(SIZES, [False, True], [0, 24]):
        case = layer(sizes, dtype=torch.bfloat16, grouped=(grouped, True), sentinel=-1)
        order, top_k = case.routing.order, case.routing.top_k
        expected = case.x if grouped else case.x[order // top_k]
        wide = torch.full((len(order), sizes.in_features + pitch), 7.0, dtype=torch.bfloat16)
        got = expert_rows_triton.rows_in(case.call(), wide[:, : sizes.in_features])
        assert torch.equal(got, expected), (sizes, grouped, pitch)
        assert (wide[:, sizes.in_features :] == 7).all()
        count += 1
    return count


if __name__ == "__main__":
    print(main())
