"""Write a weight in eight bits by torch's own operators, from its float32 values."""

from __future__ import annotations

import torch

from inductor_q.kernels.calls import Requantize
from inductor_q.kernels.dequantize import write
from inductor_q.kernels.provider import REFERENCE, Provider


class Reference(Provider[Requantize]):
    name = REFERENCE

    def run(self, call: Requantize) -> None:
        out = call.out.t() if call.transposed else call.out
        wide = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        write(call.operands, call.fmt, wide)
        wide *= call.scale.reciprocal()[:, None]
        out.copy_(wide if out.dtype.is_floating_point else wide.round_())


KERNEL = Reference()
