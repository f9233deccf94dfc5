"""Multiply rows with a packed weight: decode it, then torch's own product."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from inductor_q.kernels.calls import LinearRows
from inductor_q.kernels.dequantize import write
from inductor_q.kernels.provider import REFERENCE, Provider


class Reference(Provider[LinearRows]):
    name = REFERENCE

    def run(self, call: LinearRows) -> Tensor:
        weight = call.x.new_empty(call.shape)
        write(call.operands, call.fmt, weight)
        return F.linear(call.x, weight, call.bias)


KERNEL = Reference()
