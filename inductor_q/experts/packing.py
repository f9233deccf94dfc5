"""Quantize a stack of experts: turn a weight and a format's name into the format's operands."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from inductor_q.asked import resolve
from inductor_q.capture import LIBRARIES
from inductor_q.capture.library import Quantizer
from inductor_q.exc import NoQuantizer, WrongScheme, WrongShape
from inductor_q.formats import QuantFormat, get_format
from inductor_q.formats.aliases import ALIASES
from inductor_q.formats.encode import ENCODED
from inductor_q.formats.kbit import KBIT_SCALES, KBITS, kbit_format_name
from inductor_q.kernels.calls import DENSE


def pack(weight: Tensor, format: str) -> dict[str, Tensor]:
    """Return the operands of `weight` in `format`, by name; blocks run along the flattened stack.

    The library of a format quantizes to it; k-bit formats take the normal-float codebook. "dense"
    keeps the weight.

    Raises:
        UnknownFormat, NoQuantizer, MissingExtra, NotFinite.
        WrongScheme: two experts would share a scale.
    """
    weight = weight.detach()
    if format == DENSE:
        return {"weight": weight}
    check_written(format)
    check_cut(format, weight.shape)
    fmt = get_format(format)
    return dict(zip(fmt.operands, QUANTIZERS[fmt](weight, fmt), strict=True))


def check_cut(format: str, shape: Sequence[int]) -> None:
    """Raise where experts of a stack of this shape would share scales.

    Raises:
        WrongScheme: the format has scales for several rows, more than divide an expert's.
    """
    fmt, *_, rows, columns = get_format(format), *shape
    if fmt in ENCODED and len(shape) == 3 and rows * columns % fmt.period(columns):
        together = fmt.period(columns) // columns
        problem = f"its {together} rows to a scale do not divide the {rows} of an expert"
        raise WrongScheme(asked=format, problem=problem)


def check_written(format: str) -> None:
    """Raise unless stacks can be quantized to a format, or stay "dense".

    Raises:
        UnknownFormat, NoQuantizer.
    """
    if format != DENSE and get_format(format) not in QUANTIZERS:
        raise NoQuantizer(name=format, what="stacks of experts", known=tuple(SHORT))


def _quantize_kbit(weight: Tensor, fmt: QuantFormat, *, k: int, absmax: str) -> list[Tensor]:
    from inductor_q import kbit

    return kbit.quantize(weight, k, absmax=absmax).operands


#: The formats that can be written; the others can only be read.
QUANTIZERS: dict[QuantFormat, Quantizer] = {
    **{fmt: quantize for library in LIBRARIES for fmt, quantize in library.quantizers.items()},
    **{
        get_format(kbit_format_name(k, absmax)): partial(_quantize_kbit, k=k, absmax=absmax)
        for k in KBITS
        for absmax in KBIT_SCALES
    },
}


#: The short names that mean a format that can be written, by that format's name.
SHORT = {
    short: name
    for short, name in {**ALIASES, "nvfp4": "nvfp4_rows"}.items()
    if get_format(name) in QUANTIZERS
}


def format_of_stacks(to: Any) -> str:
    """Return the name of the format that is asked for, as `inductor_q.quantize` is asked.

    Raises:
        WrongScheme, UnknownFormat.
    """
    if isinstance(to, str) and (to in SHORT or to == DENSE):
        return SHORT.get(to, to)
    found = resolve(to)
    if not isinstance(found, str):
        problem = f"torchao packs linear layers, no stacks of experts. Ask for {', '.join(SHORT)}"
        raise WrongScheme(asked=to, problem=problem)
    return found


def operand_names(format: str) -> tuple[str, ...]:
    """Return the names under which a stack in `format` keeps its tensors."""
    return ("weight",) if format == DENSE else get_format(format).operands


def expert_shape(shape: Sequence[int], num_experts: int) -> list[int]:
    """Return [E, rows, cols] of a stack quantized in that shape, or flattened to [E rows, cols].

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
