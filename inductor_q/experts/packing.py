"""Quantize a stack of experts: a weight and a format's name to the format's operands."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from inductor_q.exc import MissingExtra, UnknownFormat, WrongShape
from inductor_q.formats import BNB_QUANT_TYPES, FORMATS, get_format
from inductor_q.formats.kbit import KBIT_FORMATS
from inductor_q.formats.scale import NestedScale
from inductor_q.kernels.calls import DENSE


def pack(weight: Tensor, format: str) -> dict[str, Tensor]:
    """The operands of `weight` in `format`, by name; blocks run along the flattened stack.

    bitsandbytes' formats are quantized by bitsandbytes, k-bit formats with the normal-float
    codebook. "dense" keeps the weight.

    Raises:
        UnknownFormat, MissingExtra.
    """
    weight = weight.detach()
    if format == DENSE:
        return {"weight": weight}
    fmt = get_format(format)
    quant_type = format.partition("_")[0]
    if quant_type in BNB_QUANT_TYPES:
        try:
            from bitsandbytes.functional import quantize_4bit
        except ImportError:
            raise MissingExtra(package="bitsandbytes", extra="bnb", feature=format) from None
        from inductor_q.capture.bnb_state import bnb_operands

        packed, state = quantize_4bit(
            weight.contiguous(),
            blocksize=fmt.scale.block,
            quant_type=quant_type,
            compress_statistics=isinstance(fmt.scale, NestedScale),
        )
        operands = bnb_operands(packed, state)[0]
    elif fmt in KBIT_FORMATS:
        from inductor_q import kbit

        operands = kbit.quantize(weight, fmt.packing.bits, absmax=format.partition("_")[2]).operands
    else:
        raise UnknownFormat(name=format, known=tuple(FORMATS))
    return dict(zip(fmt.operands, operands, strict=True))


def operand_names(format: str) -> tuple[str, ...]:
    """The names under which a stack in `format` keeps its tensors."""
    return ("weight",) if format == DENSE else get_format(format).operands


def expert_shape(shape: Sequence[int], num_experts: int) -> list[int]:
    """[E, rows, cols] of a stack that was quantized in that shape, or flattened to [E rows, cols].

    Raises:
        WrongShape: it is no stack of `num_experts` experts.
    """
    whole = [*shape]
    if len(whole) == 2 and whole[0] % num_experts == 0:
        return [num_experts, whole[0] // num_experts, whole[1]]
    if len(whole) != 3 or whole[0] != num_experts:
        expected = f"({num_experts}, rows, cols), or ({num_experts} rows, cols)"
        raise WrongShape(what="stack of experts", expected=expected, got=tuple(whole))
    return whole
