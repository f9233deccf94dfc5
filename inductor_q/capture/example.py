"""Make concrete examples of what a graph computes with: numbers for sizes and strides, no data.

A symbol is taken for the value that it had when the graph was captured, without a guard on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from inductor_q.kernels.expert_calls import Scatter2Scatter
from inductor_q.kernels.tile_map import length

#: Where a size varies, that of another batch may be so many times the one at hand.
SPREAD = 8


def hint(size: Any) -> int:
    """Return a number for a size: itself, or the example behind a symbol (this adds no guard)."""
    if isinstance(size, int):
        return size
    value = size.node.hint
    return int(value) if value is not None else 1 << 12  # unbacked: assume many rows


def likely(size: Any) -> int:
    """Return the most that a size is likely to be in other batches, for a threshold.

    Where it varies the batch at hand may be a short one, and the long ones take most of the time.
    """
    if isinstance(size, int):
        return size
    bound = size.node.shape_env.bound_sympy(size.node.expr).upper
    most = hint(size) * SPREAD
    return int(bound) if bound < most else most


def example(value: Any) -> Any:
    """Make an argument of a node concrete: a node becomes its value, and a symbol a number."""
    if isinstance(value, fx.Node):
        value = value.meta["val"]
    if isinstance(value, (list, tuple)):
        return [example(item) for item in value]
    if isinstance(value, torch.SymInt):
        return hint(value)
    if not isinstance(value, Tensor):
        return value
    sizes, strides = map(hint, value.shape), map(hint, value.stride())
    return _empty(value, tuple(sizes), tuple(strides), value.dtype)


def example_product(
    x: fx.Node,
    operands: Sequence[fx.Node],
    format: str,
    shape: Sequence[Any],
    *,
    dtype: torch.dtype,
    transposed: bool,
    top_k: int,
    grouped_in: bool,
    dim: int | None = None,
) -> Scatter2Scatter:
    """Make a call of scatter2scatter without adapters, whose routing need not exist yet.

    Args:
        x: its rows, before they are cast to `dtype`.
        dim: the dimension of size 1 that they have beside two, if any.
    """
    rows = example(x).to(dtype)
    rows = rows if dim is None else rows.squeeze(dim)
    slots = rows.shape[0] if grouped_in else rows.shape[0] * top_k
    stack = tuple(example(list(shape)))
    order = _empty(rows, (slots,), (1,), torch.int64)
    return Scatter2Scatter(
        x=rows,
        operands=[example(operand) for operand in operands],
        format=format,
        shape=stack,
        transposed=transposed,
        order=order,
        inverse=order,
        offsets=_empty(rows, (stack[0] + 1,), (1,), torch.int32),
        tiles=_empty(rows, (length(slots, stack[0]), 4), (4, 1), torch.int32),
        top_k=top_k,
        grouped_in=grouped_in,
    )


def _empty(
    like: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    mode = like.fake_mode if isinstance(like, FakeTensor) else contextlib.nullcontext()
    with mode:
        return torch.empty_strided(sizes, strides, dtype=dtype, device=like.device)
