"""scatter2scatter with the adapter added to the decoded experts: one product over the rows.

It saves the pass over [R, N] that adds the adapter's part and the product that makes it, and costs
a pass over the weights of the experts, decoded as by `scatter2scatter_dequantize` (a dense stack is
copied); so it can pay only where experts are few and rows many. The sum of weight and adapter is
rounded to the dtype of the input, in which a small adapter loses digits: `qfuse.numerics="relaxed"`
only. `x A'` is computed as elsewhere, for the gradient of B.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_q.formats import QuantFormat
from inductor_q.kernels.calls import Scatter2Scatter
from inductor_q.kernels.expert_active import ActiveExperts
from inductor_q.kernels.scatter2scatter_dequantize import decode, fewer_experts
from inductor_q.kernels.scatter2scatter_grouped_mm import (
    adapter,
    available,
    product,
    project,
    rows_in,
    rows_out,
    unsupported,
)


class Merged:
    name = "merged"

    def available(self) -> str:
        return available()

    def decodes(self, fmt: QuantFormat | None) -> str:
        return ""

    def supports(self, call: Scatter2Scatter) -> str:
        return unsupported(call) if call.rank else "there is no adapter to merge"

    def launch(self, call: Scatter2Scatter) -> tuple[Tensor, Tensor]:
        active, x = fewer_experts(call), rows_in(call)
        a, b, offsets = adapter(call, active)
        y = product(call, x, _merge(call, a, b, active), offsets)
        _, rank = project(call, x, a, offsets)
        return rows_out(call, y), rank


def _merge(call: Scatter2Scatter, a: Tensor, b: Tensor, active: ActiveExperts | None) -> Tensor:
    """`W_e + scaling B_e A_e`, summed in float32 and rounded once, stored as the call's weights."""
    weight = decode(call, active)
    left, right = (a.transpose(1, 2), b.transpose(1, 2)) if call.transposed else (b, a)
    if call.fmt is None:  # it may be the model's own
        return torch.baddbmm(weight, left, right, alpha=call.scaling)
    return weight.baddbmm_(left, right, alpha=call.scaling)


KERNEL = Merged()
