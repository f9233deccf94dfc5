"""`qfuse::grouped_gram`: for each expert, the product of two matrices over its rows.

`out[e] = left_e' @ right_e`: the gradients of adapters. Each expert's rows lie together, so its sum
is one product: no atomics, the same result every time, exact zeros where an expert has no rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inductor_q.exc import WrongShape
from inductor_q.ops.library import define
from inductor_q.ops.scatter2scatter import check_order


def grouped_gram(
    left: Tensor,
    right: Tensor,
    order: Tensor,
    offsets: Tensor,
    top_k: int,
    grouped: tuple[bool, bool],
    dtype: torch.dtype,
) -> Tensor:
    """`out[e] = sum over the rows i of expert e of left[i]' right[i]`, accumulated in float32.

    Args:
        left, right: [R, L] and [R, M] in grouped order, or [tokens, .] where `grouped` says no.
        order, offsets, top_k: of a `Routing`.
        grouped: whether the rows of `left` and of `right` are grouped.
        dtype: of the result.

    Returns:
        [E, L, M], contiguous. It has no gradient formula.
    """
    result: Tensor = torch.ops.qfuse.grouped_gram(
        left, right, order, offsets, top_k, *grouped, dtype
    )
    return result


@dataclass(frozen=True)
class GroupedGram:
    """One call as a kernel gets it: the arguments of `grouped_gram`, checked."""

    left: Tensor
    right: Tensor
    order: Tensor
    offsets: Tensor
    top_k: int
    grouped_left: bool
    grouped_right: bool
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.order.shape[0]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.offsets.shape[0] - 1, self.left.shape[1], self.right.shape[1]

    def check(self) -> None:
        check_order(self.order)
        for what, side, grouped in (
            ("left side of grouped_gram", self.left, self.grouped_left),
            ("right side of grouped_gram", self.right, self.grouped_right),
        ):
            rows = self.rows if grouped else self.rows // self.top_k
            if side.dim() != 2 or side.shape[0] != rows:
                raise WrongShape(what=what, expected=(rows, "..."), got=tuple(side.shape))


def _grouped_gram(*args: object) -> Tensor:
    call = GroupedGram(*args)  # type: ignore[arg-type]
    call.check()
    return run(call)


def run(call: GroupedGram) -> Tensor:
    """A checked call by the first kernel that serves it."""
    from inductor_q.kernels import GROUPED_GRAM  # kernels sit above ops

    if call.rows == 0:
        return call.left.new_zeros(call.shape, dtype=call.dtype)
    table = GROUPED_GRAM.get(call.left.device.type, GROUPED_GRAM["cpu"])
    return next(kernel for kernel in table if not kernel.supports(call)).launch(call)


def _fake(*args: object) -> Tensor:
    call = GroupedGram(*args)  # type: ignore[arg-type]
    call.check()
    return call.left.new_empty(call.shape, dtype=call.dtype)


def define_grouped_gram() -> None:
    define(
        "grouped_gram(Tensor left, Tensor right, Tensor order, Tensor offsets, int top_k, "
        "bool grouped_left, bool grouped_right, ScalarType dtype) -> Tensor",
        _grouped_gram,
        _fake,
    )
