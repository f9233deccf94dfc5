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
from inductor_q.kernels.calls import DropoutGradA, DropoutGradX, DropoutProject
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
)


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
        rows, columns, count, rank, width, padding = CASES[number]
        torch.manual_seed(number)
        x = torch.randn(rows, width, dtype=torch.float32)[:, :columns]
        a = torch.randn(count * rank, columns)
        seeds = torch.randint(2**63 - 1, [3])
        out = torch.full((rows, count * rank + padding), 7.0)
        expected = torch.empty_like(out)
        p = 0.05 * (number + 1)
        by_plan(dropout_triton.PROJECT, DropoutProject(x, seeds, 1, a, count, p, out))
        dropout_reference.PROJECT.run(DropoutProject(x, seeds, 1, a, count, p, expected))
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)
        low = torch.randn(rows, count * rank)
        of_a = DropoutGradA(x, seeds, 2, low, count, p)
        mine = by_plan(dropout_triton.GRAD_A, of_a)
        right = dropout_reference.GRAD_A.run(of_a)
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-4)
        of_x = DropoutGradX(a, seeds, 2, low, count, p)
        mine = by_plan(dropout_triton.GRAD_X, of_x)
        right = dropout_reference.GRAD_X.run(of_x)
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-4)
    print(len(numbers))


if __name__ == "__main__":
    main()
