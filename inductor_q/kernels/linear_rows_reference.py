"""Multiply rows with packed weights: decode them, then torch's own products."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from inductor_q.kernels.dequantize import write
from inductor_q.kernels.provider import REFERENCE, Provider
from inductor_q.kernels.rows_calls import Adapter, LinearRows


class Reference(Provider[LinearRows]):
    name = REFERENCE
    decodes_first = True

    def run(self, call: LinearRows) -> list[Tensor]:
        found = []
        for i, (operands, features) in enumerate(zip(call.weights, call.features, strict=True)):
            weight = call.x.new_empty((features, call.x.shape[1]))
            write(operands, call.fmt, weight)
            y = F.linear(call.x, weight, call.biases[i])
            adapter = call.adapters[i]
            found.append(y if adapter is None else y + adapt(call.x, adapter))
        return [F.silu(found[0]) * found[1]] if call.gated else found


def adapt(x: Tensor, adapter: Adapter) -> Tensor:
    """Compute in the adapter's dtype, as PEFT does, and round to that of `x`."""
    projected = x.to(adapter.a.dtype) @ adapter.a.t() * adapter.scaling
    return (projected @ adapter.b.t()).to(x.dtype)


KERNEL = Reference()
