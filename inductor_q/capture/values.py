"""Decode one packed weight by itself, whichever library holds it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inductor_q.capture import layout
from inductor_q.capture.bnb_state import bnb_operands, own_dtype
from inductor_q.exc import UnreadWeight


def dequantize(
    weight: Tensor, quant_state: Any = None, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the values of a 4-bit weight of bitsandbytes, or of a tensor subclass of torchao's.

    They are bitwise those of `dequantize_4bit`, and of `weight.dequantize()` where torchao has it.

    Args:
        weight: the packed weight; `Params4bit.data` or any storage dtype of it. Given transposed,
            `[1, n]`, the result is transposed too, as bitsandbytes does. Or a tensor of torchao's.
            One of floating point that no library has packed is returned unchanged.
        quant_state: the `QuantState` of bitsandbytes' weight; by default a `Params4bit`'s own.
        dtype: that of the result; the state's own, or the subclass's, by default.

    Raises:
        UnknownFormat, UnsupportedBlocksize, CorruptQuantState, WrongDtype: bitsandbytes' state.
        UnreadWeight: a subclass that none of our formats describes, or codes without what says how
            to read them.
    """
    from inductor_q import ops

    if quant_state is None:
        quant_state = getattr(weight, "quant_state", None)
    if quant_state is not None:
        operands, name, shape = bnb_operands(weight, quant_state)
        values = ops.dequantize(operands, name, shape, dtype or own_dtype(quant_state))
        return values.t() if weight.dim() == 2 and weight.shape[0] == 1 else values
    found = layout(weight)
    if found is None:
        if not weight.is_floating_point():
            reason = "they say nothing of how to read them; give the quant_state, or ask the layer"
            raise UnreadWeight(kind=f"codes in {weight.dtype}", reason=reason)
        return weight
    if found.reason:
        raise UnreadWeight(kind=found.kind, reason=found.reason)
    operands = found.take(weight, lambda function, *args, **how: function(*args, **how))
    return ops.dequantize(operands, found.format, [*weight.shape], dtype or weight.dtype)
