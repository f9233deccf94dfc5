"""`qfuse::extend` of blocks that have leading dimensions, beside matrices of as many rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from inductor_q import lowerings
from inductor_q.ops.registry import define_ops

define_ops()
EXTEND: Any = torch.ops.qfuse.extend


def operands(rows: int = 5, *, grads: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((2, rows, 16), (2 * rows, 8), (16, 4))
    x, part, right = (torch.randn(shape, generator=generator) for shape in shapes)
    return x.requires_grad_(grads), part.requires_grad_(grads), right.requires_grad_(grads)


def extended(x: Tensor, part: Tensor, right: Tensor) -> Tensor:
    result: Tensor = EXTEND([x * 2, part.relu()], [x * 2], [right])
    return result


def joined(x: Tensor, part: Tensor, right: Tensor) -> Tensor:
    part = part.relu().view(*x.shape[:-1], -1)
    return torch.cat([x * 2, part, (x * 2) @ right], -1)


def test_op() -> None:
    x, part, right = operands(grads=True)
    opcheck(EXTEND.default, ([x, part], [x], [right]))
    opcheck(EXTEND.default, ([x, part], [], []))
    results = []
    for fn in (extended, joined):
        inputs = operands(grads=True)
        result = fn(*inputs)
        results.append([result, *torch.autograd.grad(result.square().sum(), inputs)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled(dynamic: bool) -> None:
    lowerings.register()
    options: Any = {"fx_graph_cache": False}
    compiled = torch.compile(extended, dynamic=dynamic, fullgraph=True, options=options)
    for rows in (5, 7) if dynamic else (5,):
        inputs = operands(rows)
        torch.testing.assert_close(compiled(*inputs), joined(*inputs))
