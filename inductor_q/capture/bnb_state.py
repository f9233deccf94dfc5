"""bitsandbytes' QuantState as the operands of one of our formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inductor_q.exc import CorruptQuantState, UnknownFormat
from inductor_q.formats import BNB_QUANT_TYPES, bnb_format_name
from inductor_q.formats.bnb import NESTED_BLOCKSIZE


def bnb_operands(weight: Tensor, quant_state: Any) -> tuple[list[Tensor], str, list[int]]:
    """`(operands, format name, shape)` of a packed weight and its bitsandbytes `QuantState`.

    Raises:
        UnknownFormat, UnsupportedBlocksize, CorruptQuantState: the state is not one of
        bitsandbytes'
            4-bit formats, or does not fit itself.
    """
    if quant_state.quant_type not in BNB_QUANT_TYPES:
        raise UnknownFormat(name=str(quant_state.quant_type), known=tuple(BNB_QUANT_TYPES))
    nested = bool(quant_state.nested)
    name = bnb_format_name(quant_state.quant_type, quant_state.blocksize, nested)
    packed = weight.detach()
    operands = [packed, quant_state.absmax]
    if nested:
        inner = quant_state.state2
        if inner.blocksize != NESTED_BLOCKSIZE:
            raise CorruptQuantState(
                what="blocksize of the nested absmax",
                expected=NESTED_BLOCKSIZE,
                got=inner.blocksize,
                remedy="Quantize again with compress_statistics=True.",
            )
        operands += [inner.code, inner.absmax, quant_state.offset]
    return operands, name, list(quant_state.shape)


def dequantize(
    weight: Tensor, quant_state: Any = None, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The values of a bitsandbytes 4-bit weight, bitwise those of `dequantize_4bit`.

    Args:
        weight: the packed weight; `Params4bit.data` or any storage dtype of it. Given transposed,
            `[1, n]`, the result is transposed too, as bitsandbytes does.
        quant_state: its `QuantState`; None returns `weight` unchanged (it is not quantized).
        dtype: of the result; the state's own by default.

    Raises:
        UnknownFormat, UnsupportedBlocksize, CorruptQuantState, WrongDtype.
    """
    if quant_state is None:
        return weight
    from inductor_q import ops

    operands, name, shape = bnb_operands(weight, quant_state)
    values = ops.dequantize(operands, name, shape, dtype or quant_state.dtype)
    return values.t() if weight.dim() == 2 and weight.shape[0] == 1 else values


__all__: Sequence[str] = ["bnb_operands", "dequantize"]
