"""scatter2scatter on dense experts as torch's grouped GEMM, which reads them where they lie.

Nothing is copied but the rows. Providers that first write the weights in 16 bits use the functions
here, too. The Gram products are here as well.

The adapter takes three products: rows through W, rows through A, those through B. axolotl's kernels
do so at E <= 32 and K N >= 20e6 and fuse elsewhere. Here that follows from the provider and no rule
of sizes is needed: a product that reads W as it lies has no place for an adapter, one over decoded
weights has (`scatter2scatter_dequantize`), and csrc/scatter2scatter.cu takes one launch, which was
the fastest of ours in nearly every case of docs/moe-measured.md.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor
from torch.nn.functional import pad

from inductor_q.formats import QuantFormat
from inductor_q.kernels.expert_active import ActiveExperts, select_adapter
from inductor_q.kernels.expert_calls import GroupedGram, Scatter2Scatter
from inductor_q.kernels.expert_rows import expert_of_row, gather, owned, scatter
from inductor_q.kernels.gpu import on
from inductor_q.kernels.provider import Provider

ALIGNMENT = 8  # elements of 16 bits in the 16 bytes that a row of a grouped product is aligned to


class GroupedMm(Provider[Scatter2Scatter]):
    name = "grouped_mm"

    def missing(self) -> str:
        return missing()

    def unknown(self, fmt: QuantFormat | None) -> str:
        return "" if fmt is None else f"the weight is {fmt.name}, not dense"

    def refuses(self, call: Scatter2Scatter) -> str:
        if refused := self.unknown(call.fmt) or unfit(call):
            return refused
        if call.operands[0].dtype != call.x.dtype:
            return f"the weight is {call.operands[0].dtype}, not {call.x.dtype}: it has to be cast"
        return ""

    def workspace(self, call: Scatter2Scatter) -> int:
        part = call.rows * call.out_features * call.x.itemsize if call.rank else 0
        return call.gathered_bytes + call.grouped_bytes + max(part - call.late_bytes, 0)

    def run(self, call: Scatter2Scatter) -> tuple[Tensor, Tensor]:
        x = rows_in(call)
        y = product(call, x, call.operands[0], call.offsets)
        rank = add_adapter(call, x, y)
        return rows_out(call, y), rank


class GroupedGramMm(Provider[GroupedGram]):
    """The Gram products as one grouped GEMM, whose groups are along the sum."""

    name = "grouped_mm"

    def missing(self) -> str:
        return missing()

    def refuses(self, call: GroupedGram) -> str:
        if call.left.dtype != call.right.dtype:
            return "both sides must have one dtype"
        return _unfit(call.left.dtype, call.left.device, ())

    def run(self, call: GroupedGram) -> Tensor:
        left = _aligned(gather(call.left, call.grouped_left, call.order, call.top_k), 1)
        right = _aligned(gather(call.right, call.grouped_right, call.order, call.top_k), 1)
        out = torch._grouped_mm(left.t(), right, offs=call.offsets[1:])
        _, rows, cols = call.shape
        some = (call.offsets.diff() > 0).reshape(-1, 1, 1)
        return torch.where(some, out[:, :rows, :cols], 0).to(call.dtype).contiguous()


def missing() -> str:
    """Return why this torch has no grouped GEMM; empty where it has one."""
    return "" if hasattr(torch, "_grouped_mm") else "this torch has no _grouped_mm"


def unfit(call: Scatter2Scatter) -> str:
    """Return why torch's grouped GEMM cannot serve the sizes and dtype; empty where it can."""
    return _unfit(call.x.dtype, call.x.device, (call.in_features, call.out_features))


def _unfit(dtype: torch.dtype, device: torch.device, features: tuple[int, ...]) -> str:
    if dtype is not torch.bfloat16:
        return f"torch's grouped GEMM is fast in bfloat16 only, not in {dtype}"
    if any(n % ALIGNMENT for n in features):
        return f"torch's grouped GEMM wants features in multiples of {ALIGNMENT}, not {features}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "torch's grouped GEMM needs compute capability 8.0"
    return ""


def rows_in(call: Scatter2Scatter, out: Tensor | None = None) -> Tensor:
    """Return the input's rows [R, K] in grouped order.

    Args:
        out: where to write them, its rows may be apart; None for the input itself or a new tensor.
    """
    if out is None:
        if call.grouped_in:
            return call.x.contiguous()
        out = call.x.new_empty(call.rows, call.in_features)
    if fused(call.x.device):
        from inductor_q.kernels import expert_rows_triton

        with on(out.device):
            return expert_rows_triton.rows_in(call, out)
    return out.copy_(gather(call.x, call.grouped_in, call.order, call.top_k))


def product(call: Scatter2Scatter, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply grouped rows `x` with `weight`, stored as the call's are: [R, N], by `offsets`.

    Nobody's rows may be anything.
    """
    weight = weight if call.transposed else weight.transpose(1, 2)
    return torch._grouped_mm(x, weight, offs=offsets[1:])


def adapter(
    call: Scatter2Scatter, active: ActiveExperts | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return A, B and offsets of all experts, or of the active ones.

    A and B have the dtype of the input, and zeros up to an aligned rank.
    """
    assert call.lora_a is not None and call.lora_b is not None
    a, b, offsets = call.lora_a, call.lora_b, call.offsets
    if active is not None:
        a, b = select_adapter(a, b, active.ids)
        offsets = active.offsets
    return _aligned(a.to(call.x.dtype), 1), _aligned(b.to(call.x.dtype), 2), offsets


def add_adapter(
    call: Scatter2Scatter, x: Tensor, y: Tensor, active: ActiveExperts | None = None
) -> Tensor:
    """Add the adapter's part of grouped rows `x` to `y`, if there is one; return the op's second
    result."""
    if not call.rank:
        return x.new_empty(call.rows, 0)
    a, b, offsets = adapter(call, active)
    wide, rank = project(call, x, a, offsets)
    y.add_(torch._grouped_mm(wide, b.transpose(1, 2), offs=offsets[1:]), alpha=call.scaling)
    return rank


def project(call: Scatter2Scatter, x: Tensor, a: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return grouped rows `x` times A', as wide as `a`, and the op's second result."""
    wide = torch._grouped_mm(x, a.transpose(1, 2), offs=offsets[1:])
    # A row that no product wrote may be NaN.
    return wide, torch.where(owned(call.rows, call.offsets), wide[:, : call.rank], 0)


def rows_out(call: Scatter2Scatter, y: Tensor) -> Tensor:
    """Make the op's first result of grouped rows `y` without bias and gates; overwrite them."""
    if call.bias is not None:
        expert = expert_of_row(call.rows, call.offsets).clamp(max=call.num_experts - 1)
        y = y.add_(call.bias.to(y.dtype)[expert])
    if not fused(y.device):
        return scatter(y, call)
    from inductor_q.kernels import expert_rows_triton

    with on(y.device):  # rows that are owned and have no gates are not touched again
        return expert_rows_triton.rows_out(call, y.contiguous())


@functools.cache
def fused(device: torch.device) -> bool:
    """Whether Triton kernels bring rows in and out, in one pass each."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def _aligned(x: Tensor, dim: int) -> Tensor:
    """Return `x`, contiguous, with zeros up to a multiple of ALIGNMENT along `dim`."""
    missing = -x.shape[dim] % ALIGNMENT
    if not missing:
        return x.contiguous()
    return pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing))


KERNEL = GroupedMm()
GRAM = GroupedGramMm()
