"""scatter2scatter as torch's grouped GEMM over experts that are decoded at once.

This is the fastest way in plain torch where each expert has many rows: the decode runs at the speed
of memory and its cost is shared by all rows. It holds every expert in 16 bits while it runs, and
nothing of them afterwards. With fewer rows than experts it decodes as many experts as there are
rows, which is the most that can have any (`inductor_q.kernels.expert_active`).

The adapter rides in the same product, `[x | s x A'] [W | B]'`, summed in float32: rows are copied
into grouped order and weights decoded anyway, so they go straight into wider buffers, and there is
no second product [R, N] to write, read and add. A format that is decoded by rows and read
transposed takes a second product all the same: its decode writes all experts as one matrix, in
which there is no room for B between two of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from inductor_q.formats import QuantFormat
from inductor_q.kernels.expert_active import ActiveExperts, active_experts
from inductor_q.kernels.expert_calls import IN_FP8, Scatter2Scatter
from inductor_q.kernels.expert_weights import ExpertWeights
from inductor_q.kernels.provider import Provider, against
from inductor_q.kernels.scatter2scatter_grouped_mm import (
    adapter,
    add_adapter,
    missing,
    product,
    project,
    rows_in,
    rows_out,
    unfit,
)

PITCH = 64  # rows of buffers are multiples of 64 elements long: 128 bytes, a line of the cache


class Dequantize(Provider[Scatter2Scatter]):
    name = "dequantize"
    decodes_first = True

    def missing(self) -> str:
        return missing()

    def refuses(self, call: Scatter2Scatter) -> str:
        if call.fmt is None and call.operands[0].dtype == call.x.dtype:
            return "the weight is dense, in the dtype of the input: there is nothing to decode"
        return unfit(call)  # a dense weight in another dtype is cast

    def workspace(self, call: Scatter2Scatter) -> int:
        """Count all experts in 16 bits, which are gone before rows are summed by token."""
        active, size, k = min(call.rows, call.num_experts), call.x.itemsize, call.in_features
        rides = _rides(call)
        wide = -(-(k + call.rank) // PITCH) * PITCH if rides else k
        weights = active * call.out_features * wide * size
        part = call.rows * call.out_features * size if call.rank and not rides else 0
        rows = call.rows * wide * size if rides else call.gathered_bytes
        return rows + call.grouped_bytes + max(weights - call.late_bytes, part - call.late_bytes, 0)

    def run(self, call: Scatter2Scatter) -> tuple[Tensor, Tensor]:
        active = fewer_experts(call)
        if _rides(call):
            y, rank = _extended(call, active)
            return rows_out(call, y), rank
        offsets = call.offsets if active is None else active.offsets
        x = rows_in(call)
        y = product(call, x, decode(call, active), offsets)  # the weight is gone after it
        rank = add_adapter(call, x, y, active)
        return rows_out(call, y), rank


def _rides(call: Scatter2Scatter) -> bool:
    """Whether there is an adapter, and it has a place beside the decoded weight."""
    by_rows = call.fmt is not None and call.fmt.by_rows
    return call.rank > 0 and not (call.transposed and by_rows)


def fewer_experts(call: Scatter2Scatter) -> ActiveExperts | None:
    """Find the experts with rows, where there are fewer rows than experts; else None."""
    return active_experts(call.offsets, call.rows) if call.rows < call.num_experts else None


def decode(
    call: Scatter2Scatter, active: ActiveExperts | None, out: Tensor | None = None
) -> Tensor:
    """Decode the experts' weights, or those of the active ones, stored as the call's are."""
    weights = ExpertWeights(call.operands, call.fmt, call.shape, call.x.dtype)
    return weights.all(out) if active is None else weights.some(active.ids, out)


def _extended(call: Scatter2Scatter, active: ActiveExperts | None) -> tuple[Tensor, Tensor]:
    """Return [R, N] with the adapter's part, anything in nobody's rows; and the second result."""
    a, b, offsets = adapter(call, active)
    x = _wide(call.x, call.rows, call.in_features, a.shape[1])
    rows, beside = x.split([call.in_features, a.shape[1]], 1)
    wide, rank = project(call, rows_in(call, rows), a, offsets)
    torch.mul(wide, call.scaling, out=beside)
    return product(call, x, _extended_weight(call, active, b), offsets), rank


def _extended_weight(call: Scatter2Scatter, active: ActiveExperts | None, b: Tensor) -> Tensor:
    """Return `[W | B]`, [A, N, K + r] or [A, K + r, N]; `b` is [A, N, r]."""
    (experts, n, rank), k = b.shape, call.in_features
    if call.transposed:
        weight = b.new_empty(experts, k + rank, n)
        base, beside = weight[:, :k], weight[:, k:].transpose(1, 2)
    else:
        weight = _wide(b, experts * n, k, rank).unflatten(0, (experts, n))
        base, beside = weight[..., :k], weight[..., k:]
    decode(call, active, base)
    beside.copy_(b)
    return weight


def _wide(like: Tensor, rows: int, features: int, rank: int) -> Tensor:
    """Allocate [rows, features + rank], with longer rows in memory."""
    pitch = -(-(features + rank) // PITCH) * PITCH
    return torch.empty((rows, pitch), dtype=like.dtype, device=like.device)[:, : features + rank]


KERNEL = Dequantize()


class Large(NamedTuple):
    """Hold the sizes from which on experts are decoded first; they need to have both.

    Args:
        elements: of one expert's weight.
        rows: of the input, for each expert.
        elements_transposed, rows_transposed: the same where the weight is read transposed, where
            torch's grouped GEMM gains less.
    """

    elements: int
    rows: int
    elements_transposed: int
    rows_transposed: int


def preferred(call: Scatter2Scatter, named: str, large: Large | None) -> str:
    """Return the provider to ask first: the one that is named, or for large experts this one.

    Experts in FP8 have no choice.

    Args:
        large: which experts are large; None: none are.
    """
    if call.op == IN_FP8:
        return "auto"
    if named != "auto" or call.fmt is None or large is None:
        return named
    if not _is_large(call, call.fmt, large):
        return named
    return named if against(KERNEL, call) else KERNEL.name


def _is_large(call: Scatter2Scatter, fmt: QuantFormat, large: Large) -> bool:
    elements, rows = call.in_features * call.out_features, call.rows_each
    if call.transposed:
        # What is decoded by rows has no place for the adapter there, which is a product more.
        wide, tall = large.elements_transposed, large.rows_transposed
        return elements >= wide and rows >= tall and not fmt.by_rows
    return elements >= large.elements and rows >= large.rows
