"""Adapters under dropout: their products with an input of which each drops its own elements.

Every adapter of a PEFT model drops elements of its layer's input (`lora_dropout`). Written out,
that is a copy of the input for each adapter, and again in backward. These ops make the mask inside
the kernel from a seed, and make it again for the gradients, so neither a mask nor what it leaves is
ever stored. `passes/fuse_dropout.py` emits them.

Which elements an adapter keeps is decided by Philox-4x32 (Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3", SC 2011), counted by row, column and adapter under the key `seeds[index]`:
`kernels/dropout.py` says how. It depends on nothing else, neither the device nor the shape of x.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inductor_q.kernels.calls import schema
from inductor_q.kernels.dispatch import serve
from inductor_q.kernels.dropout_calls import (
    AddDropoutGradX,
    DropoutGradA,
    DropoutGradX,
    DropoutProject,
)
from inductor_q.ops.library import define


def dropout_project(
    x: Tensor, seeds: Tensor, index: int, a: Tensor, count: int, p: float
) -> Tensor:
    """Project the input, with elements dropped, by each of several adapters.

    Args:
        x: [M, K] in a 16-bit dtype or float32, with columns side by side.
        seeds, index: [n] int64 on the same device, and which of them is this input's.
        a: [count * r, K] in the dtype of x, the adapters' A one below the other.
        count: how many adapters of rank r there are; each has a mask of its own.
        p: the share of elements that is dropped, 0 <= p < 1. The others are scaled by 1 / (1 - p).

    Returns:
        [M, count * r] in the dtype of x. It has no gradient formula: `dropout_grad_a` and
        `dropout_grad_x` are emitted for it.
    """
    return _project_out(x, seeds, index, a, count, p, out=x.new_empty((x.shape[0], a.shape[0])))


def dropout_grad_a(*args: Any) -> Tensor:
    """Compute the gradient of `a` of `dropout_project` under the same masks.

    It is an op apart from `dropout_grad_x`, so that an x which backward computes again need not be
    there before its gradient: one kernel can make both x and what follows from its gradient.

    Args:
        args: x, seeds and index of `dropout_project`; `grad` [M, count * r], the gradient of its
            result; its count and p.

    Returns:
        [count * r, K] in the dtype of x.
    """
    call = DropoutGradA(*args)
    call.check()
    result: Tensor = serve("dropout_grad_a", call)
    return result


def dropout_grad_x(*args: Any) -> Tensor:
    """Compute the gradient of x of `dropout_project` under the same masks.

    Args:
        args: a, seeds and index of `dropout_project`; `grad` [M, count * r], the gradient of its
            result; its count and p.

    Returns:
        [M, K] in the dtype of x.
    """
    call = DropoutGradX(*args)
    call.check()
    result: Tensor = serve("dropout_grad_x", call)
    return result


def add_dropout_grad_x(base: Tensor, *args: Any) -> Tensor:
    """Return `base + dropout_grad_x(*args)`, added up in float32 and rounded once.

    In a compiled graph it takes the memory of a product `base` that nothing else reads.

    Args:
        base: [M, K] in the dtype of `a`.
    """
    total = base.clone(memory_format=torch.contiguous_format)
    add_dropout_grad_x_(total, *args)
    return total


def add_dropout_grad_x_(
    base: Tensor, a: Tensor, seeds: Tensor, index: int, grad: Tensor, count: int, p: float
) -> None:
    """Add what `dropout_grad_x` computes to `base` [M, K] in place, rounded once."""
    call = AddDropoutGradX(a, seeds, index, grad, count, p, base)
    call.check()
    serve("dropout_grad_x", call)


def extend_dropped(
    x: Tensor, seeds: Tensor, index: int, a: Tensor, count: int, p: float, padding: int
) -> Tensor:
    """Return `[x | dropout_project(x, ...) | 0]` with `padding` columns of zeros.

    Args:
        x: [..., K], contiguous.

    Returns:
        [..., K + count * r + padding], contiguous: the left operand of `extend_k`'s product. See
        `qfuse::extend` for why this is one op.
    """
    wide = _fake_extend(x, seeds, index, a, count, p, padding)
    columns = x.shape[-1]
    wide[..., :columns] = x
    matrix = wide.view(-1, wide.shape[-1])
    _project_out(matrix[:, :columns], seeds, index, a, count, p, out=matrix[:, columns:])
    return wide


def _project_out(
    x: Tensor, seeds: Tensor, index: int, a: Tensor, count: int, p: float, *, out: Tensor
) -> Tensor:
    call = DropoutProject(x, seeds, index, a, count, p, out)
    call.check()
    serve("dropout_project", call)
    return out


def _fake_project(x: Tensor, seeds: Tensor, index: int, a: Tensor, count: int, p: float) -> Tensor:
    return x.new_empty((x.shape[0], a.shape[0]))


def _fake_project_out(
    x: Tensor, seeds: Tensor, index: int, a: Tensor, count: int, p: float, *, out: Tensor
) -> Tensor:
    return out


def _fake_grad_a(*args: Any) -> Tensor:
    return DropoutGradA(*args).new()


def _fake_grad_x(*args: Any) -> Tensor:
    return DropoutGradX(*args).new()


def _fake_extend(
    x: Tensor, seeds: Tensor, index: int, a: Tensor, count: int, p: float, padding: int
) -> Tensor:
    assert a.shape[1] == x.shape[-1], f"{a.shape=} {x.shape=}"
    return x.new_empty((*x.shape[:-1], x.shape[-1] + a.shape[0] + padding))


def define_dropout() -> None:
    arguments = "Tensor x, Tensor seeds, int index, Tensor a, int count, float p"
    define(f"dropout_project({arguments}) -> Tensor", dropout_project, _fake_project)
    define(
        f"dropout_project.out({arguments}, *, Tensor(a!) out) -> Tensor(a!)",
        _project_out,
        _fake_project_out,
    )
    define(schema("dropout_grad_a", DropoutGradA, "Tensor"), dropout_grad_a, _fake_grad_a)
    define(schema("dropout_grad_x", DropoutGradX, "Tensor"), dropout_grad_x, _fake_grad_x)
    rest = "Tensor a, Tensor seeds, int index, Tensor grad, int count, float p)"
    added = f"add_dropout_grad_x(Tensor base, {rest} -> Tensor"
    define(added, add_dropout_grad_x, lambda base, *args: base.new_empty(base.shape))
    in_place = f"add_dropout_grad_x_(Tensor(a!) base, {rest} -> ()"
    define(in_place, add_dropout_grad_x_, lambda base, *args: None)
    define(f"extend_dropped({arguments}, int padding) -> Tensor", extend_dropped, _fake_extend)
