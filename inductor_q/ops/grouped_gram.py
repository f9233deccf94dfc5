"""`qfuse::grouped_gram`: for each expert, the product of two matrices over its rows.

`out[e] = left_e' @ right_e` is the gradient of an adapter. Each expert's rows lie together, so its
sum is one product: no atomics, the same result every time, exact zeros where it has no rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_q.kernels.calls import schema
from inductor_q.kernels.dispatch import serve
from inductor_q.kernels.expert_calls import GroupedGram
from inductor_q.ops.library import define


def grouped_gram(
    left: Tensor,
    right: Tensor,
    order: Tensor,
    offsets: Tensor,
    top_k: int,
    grouped: tuple[bool, bool],
    dtype: torch.dtype,
) -> Tensor:
    """Sum `left[i]' right[i]` over the rows i of each expert, accumulated in float32.

    Args:
        left, right: [R, L] and [R, M] in grouped order, or [tokens, .] where `grouped` says no.
        order, offsets, top_k: those of a `Routing`.
        grouped: whether the rows of `left` and of `right` are grouped.
        dtype: that of the result.

    Returns:
        [E, L, M], contiguous. It has no gradient formula.
    """
    result: Tensor = torch.ops.qfuse.grouped_gram(
        left, right, order, offsets, top_k, *grouped, dtype
    )
    return result


def _grouped_gram(*args: object) -> Tensor:
    call = GroupedGram(*args)  # type: ignore[arg-type]
    call.check()
    result: Tensor = serve("grouped_gram", call)
    return result


def _fake(*args: object) -> Tensor:
    call = GroupedGram(*args)  # type: ignore[arg-type]
    call.check()
    return call.left.new_empty(call.shape, dtype=call.dtype)


def define_grouped_gram() -> None:
    define(schema("grouped_gram", GroupedGram, "Tensor"), _grouped_gram, _fake)
