"""`qfuse::extend` of blocks that have leading dimensions, beside matrices of as many rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.library import opcheck

from inductor_q import lowerings
from inductor_q.ops.registry import define_ops

define_ops()
EXTEND: Any = torch.ops.qfuse.extend
EXTEND_GRADS: Any = torch.ops.qfuse.extend_grads


def operands(rows: int = 5, *, grads: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((2, rows, 16), (2 * rows, 8), (16, 4))
    x, part, right = (torch.randn(shape, generator=generator) for shape in shapes)
    return x.requires_grad_(grads), part.requires_grad_(grads), right.requires_grad_(grads)


def extended(x: Tensor, part: Tensor, right: Tensor) -> Tensor:
    result: Tensor = EXTEND([x * 2, part.relu()], [x * 2], [right], 0)
    return result


def with_zeros(x: Tensor, part: Tensor, right: Tensor) -> Tensor:
    result: Tensor = EXTEND([x * 2, part.relu()], [x * 2], [right], 3)
    return result


def joined(x: Tensor, part: Tensor, right: Tensor) -> Tensor:
    part = part.relu().view(*x.shape[:-1], -1)
    return torch.cat([x * 2, part, (x * 2) @ right], -1)


def test_op() -> None:
    x, part, right = operands(grads=True)
    opcheck(EXTEND.default, ([x, part], [x], [right], 3))
    opcheck(EXTEND.default, ([x, part], [], [], 0))
    opcheck(EXTEND.default, ([x, part], [], [], 3))
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
    blocks = torch.compile(lambda x: EXTEND([x * 2], [], [], 3), fullgraph=True, options=options)
    torch.testing.assert_close(blocks(inputs[0]), nn.functional.pad(inputs[0] * 2, (0, 3)))
    padded = torch.compile(with_zeros, dynamic=dynamic, fullgraph=True, options=options)
    zeros = torch.zeros(2, rows, 3)
    torch.testing.assert_close(padded(*inputs), torch.cat([joined(*inputs), zeros], -1))


def grads_beside(x: Tensor, y: Tensor, bs: list[Tensor], ps: list[Tensor]) -> list[Tensor]:
    """The gradients of two layers, of which one has leading dimensions."""
    x, y = x * 2, y.relu()
    wide, *of_bs = EXTEND_GRADS([x, y], [x, y], bs, ps, [0.5, 1.0], [2.0, 1.0], 3)
    return [wide.reshape(-1, wide.shape[-1]) @ wide.new_ones((wide.shape[-1], 8)), *of_bs, wide + 1]


def grads_apart(x: Tensor, y: Tensor, bs: list[Tensor], ps: list[Tensor]) -> list[Tensor]:
    x, y = x * 2, y.relu()
    flat = x.reshape(-1, 16)
    zeros = x.new_zeros((len(flat), 3))
    wide = torch.cat([flat, y, (flat @ bs[0]) * 0.5, y @ bs[1], zeros], 1)
    of_bs = [(flat.t() @ ps[0]) * 2.0, y.t() @ ps[1]]
    product = wide @ wide.new_ones((wide.shape[1], 8))
    return [product, *of_bs, wide.view(*x.shape[:-1], -1) + 1]


def grads_operands(rows: int) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    x, y, b = operands(rows)
    generator = torch.Generator().manual_seed(rows)
    shapes = ((8, 2), (2 * rows, 4), (2 * rows, 2))
    other, *ps = (torch.randn(shape, generator=generator) for shape in shapes)
    return x, y, [b, other], ps


def test_op_of_gradients() -> None:
    x, y, bs, ps = grads_operands(5)
    factors = ([0.5, 1.0], [2.0, 1.0])
    opcheck(EXTEND_GRADS.default, ([x, y], [x, y], bs, ps, *factors, 3))
    opcheck(EXTEND_GRADS.default, ([y, y], [y], bs[1:], ps[1:], [1.0], [1.0], 0))
    torch.testing.assert_close(grads_beside(x, y, bs, ps), grads_apart(x, y, bs, ps))


@pytest.mark.parametrize("cpp_wrapper", [False, True], ids=["", "cpp_wrapper"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_gradients_compiled(dynamic: bool, cpp_wrapper: bool) -> None:
    lowerings.register()
    options: Any = {"fx_graph_cache": False, "cpp_wrapper": cpp_wrapper}
    compiled = torch.compile(grads_beside, dynamic=dynamic, fullgraph=True, options=options)
    for rows in (5, 7) if dynamic else (5,):
        inputs = grads_operands(rows)
        found, codes = run_and_get_code(compiled, *inputs)
        torch.testing.assert_close(found, grads_apart(*inputs))
        if codes:
            assert codes[0].count("qfuse_adapter_grads(") == (0 if cpp_wrapper else 2)
