"""scatter2scatter as torch's grouped GEMM over experts that are decoded at once.

The fastest way in plain torch where each expert has many rows: the decode runs at the speed of
memory and its cost is shared by all rows. It holds every expert in 16 bits while it runs, and
nothing of them afterwards. With fewer rows than experts it decodes as many experts as there are
rows, which is the most that can have any (`inductor_q.experts.active`).
"""

from __future__ import annotations

from torch import Tensor

from inductor_q.experts.active import ActiveExperts, active_experts
from inductor_q.formats import QuantFormat
from inductor_q.kernels.expert_weights import ExpertWeights
from inductor_q.kernels.scatter2scatter_grouped_mm import (
    available,
    product,
    rows_in,
    rows_out,
    unsupported,
)
from inductor_q.ops.scatter2scatter import Scatter2Scatter


class Dequantize:
    name = "dequantize"

    def available(self) -> str:
        return available()

    def decodes(self, fmt: QuantFormat | None) -> str:
        return ""  # a dense weight in another dtype is cast

    def supports(self, call: Scatter2Scatter) -> str:
        if call.fmt is None and call.operands[0].dtype == call.x.dtype:
            return "the weight is dense, in the dtype of the input: there is nothing to decode"
        return unsupported(call)

    def launch(self, call: Scatter2Scatter) -> tuple[Tensor, Tensor]:
        active = fewer_experts(call)
        offsets = call.offsets if active is None else active.offsets
        x = rows_in(call)
        y = product(call, x, decode(call, active), offsets)  # the weight is gone after it
        return rows_out(call, x, y, active)


def fewer_experts(call: Scatter2Scatter) -> ActiveExperts | None:
    """The experts with rows, where there are fewer rows than experts."""
    return active_experts(call.offsets, call.rows) if call.rows < call.num_experts else None


def decode(call: Scatter2Scatter, active: ActiveExperts | None) -> Tensor:
    """The experts' weights, or those of the active ones, stored as the call's are."""
    weights = ExpertWeights(call.operands, call.fmt, call.shape, call.x.dtype)
    return weights.all() if active is None else weights.some(active.ids)


KERNEL = Dequantize()
