"""scatter2scatter as torch's grouped GEMM over all experts, decoded at once.

The fastest way in plain torch where each expert has many rows: the decode runs at the speed of
memory and its cost is shared by all rows. It holds every expert in 16 bits while it runs, and
nothing of them afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from inductor_q.kernels.expert_rows import expert_of_row, gather, owned, scatter
from inductor_q.kernels.expert_weights import ExpertWeights
from inductor_q.ops.grouped_gram import GroupedGram
from inductor_q.ops.scatter2scatter import Scatter2Scatter

ALIGNMENT = 8  # elements of 16 bits in the 16 bytes that a row of a grouped product is aligned to


class Dequantize:
    name = "dequantize"

    def available(self) -> str:
        return _available()

    def supports(self, call: Scatter2Scatter) -> str:
        features = (call.in_features, call.out_features)
        return _available() or _unsupported(call.x.dtype, call.x.device, features)

    def launch(self, call: Scatter2Scatter) -> tuple[Tensor, Tensor]:
        offs = call.offsets[1:]
        x = gather(call.x, call.grouped_in, call.order, call.top_k).contiguous()
        weight = ExpertWeights(call.operands, call.fmt, call.shape, x.dtype).all()
        y = torch._grouped_mm(x, weight if call.transposed else weight.transpose(1, 2), offs=offs)
        del weight
        rank = x.new_empty(call.rows, 0)
        if call.lora_a is not None and call.lora_b is not None:
            a, b = (_aligned(t.to(x.dtype), dim) for t, dim in ((call.lora_a, 1), (call.lora_b, 2)))
            wide = torch._grouped_mm(x, a.transpose(1, 2), offs=offs)
            y = y.add_(torch._grouped_mm(wide, b.transpose(1, 2), offs=offs), alpha=call.scaling)
            # A row that no product wrote may be NaN.
            rank = torch.where(owned(call.rows, call.offsets), wide[:, : call.rank], 0)
        if call.bias is not None:
            expert = expert_of_row(call.rows, call.offsets).clamp(max=call.num_experts - 1)
            y = y.add_(call.bias.to(y.dtype)[expert])
        return scatter(y, call), rank


class GroupedMm:
    """The Gram products as one grouped GEMM, whose groups are along the sum."""

    name = "grouped_mm"

    def available(self) -> str:
        return _available()

    def supports(self, call: GroupedGram) -> str:
        if call.left.dtype != call.right.dtype:
            return "both sides must have one dtype"
        return _available() or _unsupported(call.left.dtype, call.left.device, ())

    def launch(self, call: GroupedGram) -> Tensor:
        left = _aligned(gather(call.left, call.grouped_left, call.order, call.top_k), 1)
        right = _aligned(gather(call.right, call.grouped_right, call.order, call.top_k), 1)
        out = torch._grouped_mm(left.t(), right, offs=call.offsets[1:])
        _, rows, cols = call.shape
        some = (call.offsets.diff() > 0).reshape(-1, 1, 1)
        return torch.where(some, out[:, :rows, :cols], 0).to(call.dtype).contiguous()


def _available() -> str:
    return "" if hasattr(torch, "_grouped_mm") else "this torch has no _grouped_mm"


def _unsupported(dtype: torch.dtype, device: torch.device, features: tuple[int, ...]) -> str:
    if dtype is not torch.bfloat16:
        return f"torch's grouped GEMM is fast in bfloat16 only, not in {dtype}"
    if any(n % ALIGNMENT for n in features):
        return f"torch's grouped GEMM wants features in multiples of {ALIGNMENT}, not {features}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "torch's grouped GEMM needs compute capability 8.0"
    return ""


def _aligned(x: Tensor, dim: int) -> Tensor:
    """`x`, contiguous, with zeros up to a multiple of ALIGNMENT along `dim`."""
    missing = -x.shape[dim] % ALIGNMENT
    if not missing:
        return x.contiguous()
    return pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing))


KERNEL = Dequantize()
GRAM = GroupedMm()
