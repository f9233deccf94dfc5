"""The semantics of scatter2scatter and grouped_gram, one expert after the other.

On a CPU each expert multiplies its own rows. Elsewhere, where the number of rows is not known
without waiting for the device, it multiplies all of them and keeps its own: right, and slow. Where
a CPU multiplies slowly in 16 bits, products are in float32 where that is faster, and no option
changes it. Products in FP8 are emulated: both sides are rounded, and multiplied in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import linear

from inductor_q.kernels.expert_calls import GroupedGram, Scatter2Scatter
from inductor_q.kernels.expert_rows import expert_of_row, gather, scatter
from inductor_q.kernels.expert_weights import ExpertWeights
from inductor_q.kernels.provider import REFERENCE, Provider
from inductor_q.kernels.rounding import cast_rows
from inductor_q.kernels.wide import multiplies_slowly

E4M3 = torch.float8_e4m3fn

#: `x W'` of fewer rows takes longer in float32 than in 16 bits, also on a slow CPU. The preset of
#: CPUs has the same number as `widen_products.min_rows`; kernels see no preset.
_FEW = 16


class Reference(Provider[Scatter2Scatter]):
    name = REFERENCE
    decodes_first = True

    def workspace(self, call: Scatter2Scatter) -> int:
        """Count rows, and one expert, in the dtype of the input and as it is cast."""
        wide = 8 if call.row_scale is not None else 4 if multiplies_slowly(call.x) else 0
        expert = call.in_features * call.out_features * (call.x.itemsize + wide)
        return call.gathered_bytes + call.grouped_bytes + expert

    def run(self, call: Scatter2Scatter) -> tuple[Tensor, Tensor]:
        x = gather(call.x, call.grouped_in, call.order, call.top_k)
        weights = ExpertWeights(call.operands, call.fmt, call.shape, x.dtype)
        y = x.new_zeros(call.rows, call.out_features)
        rank = x.new_zeros(call.rows, call.rank)
        for expert, rows in _experts(call.offsets, call.rows):
            y_part, rank_part = _layer(call, x[rows], weights[expert], expert)
            if call.x.device.type == "cpu":
                y[rows], rank[rows] = y_part, rank_part
            else:
                own = (expert_of_row(call.rows, call.offsets) == expert).unsqueeze(1)
                y, rank = torch.where(own, y_part, y), torch.where(own, rank_part, rank)
        return scatter(y, call), rank


class GramReference(Provider[GroupedGram]):
    name = REFERENCE

    def run(self, call: GroupedGram) -> Tensor:
        dtype = torch.promote_types(call.left.dtype, call.dtype)
        if multiplies_slowly(call.left):
            dtype = torch.float32
        left = gather(call.left, call.grouped_left, call.order, call.top_k)
        right = gather(call.right, call.grouped_right, call.order, call.top_k)
        out = left.new_zeros(call.shape, dtype=call.dtype)
        for expert, rows in _experts(call.offsets, call.rows):
            a, b = left[rows].to(dtype), right[rows].to(dtype)
            if call.left.device.type != "cpu":
                own = (expert_of_row(call.rows, call.offsets) == expert).unsqueeze(1)
                a, b = torch.where(own, a, 0), torch.where(own, b, 0)
            out[expert] = a.t() @ b
        return out


def _experts(offsets: Tensor, rows: int) -> Iterator[tuple[int, slice]]:
    """Yield experts and the grouped rows to multiply, without experts known to have none."""
    if offsets.device.type != "cpu":
        yield from ((expert, slice(0, rows)) for expert in range(offsets.shape[0] - 1))
        return
    for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
        if start < end:
            yield expert, slice(start, end)


def _layer(call: Scatter2Scatter, x: Tensor, weight: Tensor, expert: int) -> tuple[Tensor, Tensor]:
    """Send rows `x` through one expert, without gates, and through its A."""
    if multiplies_slowly(x) and (call.transposed or len(x) >= _FEW):
        y, rank = _layer(call, x.float(), weight.float(), expert)
        return y.to(x.dtype), rank.to(x.dtype)
    if call.row_scale is not None:
        return _in_fp8(call, call.row_scale, x, weight, expert)
    weight = weight.t() if call.transposed else weight
    y = linear(x, weight, None if call.bias is None else call.bias[expert].to(x.dtype))
    return _add_adapter(call, y, x, expert)


def _in_fp8(
    call: Scatter2Scatter, row_scale: Tensor, x: Tensor, weight: Tensor, expert: int
) -> tuple[Tensor, Tensor]:
    scale = row_scale.view(call.shape[:2])[expert]
    codes = (weight.float() * scale.reciprocal().unsqueeze(1)).to(E4M3).float()
    if call.transposed:  # the sum is over what the scales differ along
        rows, of_rows = cast_rows(x, E4M3, scale)
        y = (rows.float() @ codes) * of_rows
    else:
        rows, of_rows = cast_rows(x, E4M3)
        y = (rows.float() @ codes.t()) * of_rows * scale
    if call.bias is not None:
        y = y + call.bias[expert].float()
    return _add_adapter(call, y.to(x.dtype), x, expert)


def _add_adapter(call: Scatter2Scatter, y: Tensor, x: Tensor, expert: int) -> tuple[Tensor, Tensor]:
    """Return `y` with the adapter's part, and `x` through its A."""
    if call.lora_a is None or call.lora_b is None:
        return y, x[:, :0]
    a, b = call.lora_a[expert].to(x.dtype), call.lora_b[expert].to(x.dtype)
    rank = x @ a.t()
    return torch.addmm(y, rank, b.t(), alpha=call.scaling), rank


KERNEL = Reference()
GRAM = GramReference()
