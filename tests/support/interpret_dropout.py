"""Run the Triton kernels of dropout on CPU tensors under Triton's interpreter (TRITON_INTERPRET=1).

A program of its own, because Triton decides at import whether it interprets. It compares each case
with the reference, whose masks are the definition, and prints how many there were. Numbers on the
command line choose cases.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from inductor_q.kernels import dropout_reference, dropout_triton
from inductor_q.kernels.dropout_calls import (
    AddDropoutGradX,
    DropoutGradA,
    DropoutGradX,
    DropoutProject,
)
from tests.support.processes import asked_for

#: rows, columns, adapters, rank, columns of the buffer that x lies in, padding of the result.
CASES = (
    (300, 160, 3, 8, 160, 0),
    (64, 64, 1, 16, 128, 48),
    (257, 600, 2, 17, 600, 30),
    (1, 33, 1, 1, 40, 3),
    (520, 70, 1, 4, 70, 0),
    (70, 640, 2, 8, 640, 0),  # a whole number of tiles, not of parts
    (1, 128, 1, 16, 130, 16),
    (40, 96, 3, 128, 96, 0),  # q, k and v
    (33, 72, 1, 200, 80, 0),  # two slices of an adapter
    (130, 1100, 1, 96, 1100, 8),  # more than a part of columns, and ranks that fill no tile
    (1030, 64, 1, 65, 64, 3),  # more than a part of rows
)
#: The dtypes of x and A; of bfloat16 Triton's interpreter multiplies the integers that it stores.
DTYPES = (torch.float32, torch.float16)


def by_plan(provider: Any, call: Any) -> Tensor:
    """Serve a call by the plan of another of its kind, whose tensors hold zeros."""
    tensors = {f.name: getattr(call, f.name) for f in fields(call)}
    zeros = {
        name: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()
        for name, value in tensors.items()
        if isinstance(value, Tensor)
    }
    result: Tensor = provider.plan(replace(call, **zeros))(call)
    return result


def main() -> None:
    numbers = [int(number) for number in asked_for(map(str, range(len(CASES))))]
    for number in numbers:
        for dtype in DTYPES:
            compare(number, dtype)
    print(len(numbers))


def compare(number: int, dtype: torch.dtype) -> None:
    rows, columns, count, rank, width, padding = CASES[number]
    torch.manual_seed(number)
    x = torch.randn(rows, width).to(dtype)[:, :columns]
    a = torch.randn(count * rank, columns).to(dtype)
    seeds = torch.randint(2**63 - 1, [3])
    out = torch.full((rows, count * rank + padding), 7.0, dtype=dtype)
    expected = torch.empty(out.shape)
    p = 0.05 * (number + 1)
    by_plan(dropout_triton.PROJECT, DropoutProject(x, seeds, 1, a, count, p, out))
    dropout_reference.PROJECT.run(
        DropoutProject(x.float(), seeds, 1, a.float(), count, p, expected)
    )
    results = [(out, expected)]
    low = torch.randn(rows, count * rank).to(dtype)
    rest = (seeds, 2, low, count, p)
    exact = (seeds, 2, low.float(), count, p)
    mine = by_plan(dropout_triton.GRAD_A, DropoutGradA(x, *rest))
    results.append((mine, dropout_reference.GRAD_A.run(DropoutGradA(x.float(), *exact))))
    mine = by_plan(dropout_triton.GRAD_X, DropoutGradX(a, *rest))
    of_x = dropout_reference.GRAD_X.run(DropoutGradX(a.float(), *exact))
    results.append((mine, of_x))
    base = torch.randn(rows, columns).to(dtype)
    of_x = of_x + base.float()
    mine = by_plan(dropout_triton.GRAD_X, AddDropoutGradX(a, *rest, base))
    assert mine is base
    results.append((mine, of_x))
    for mine, right in results:
        # Sums are in float32, in another order; a result in 16 bits is rounded once.
        rtol = 1e-5 if dtype is torch.float32 else torch.finfo(dtype).eps
        torch.testing.assert_close(mine.float(), right, rtol=rtol, atol=2e-4)


if __name__ == "__main__":
    main()
