"""Read bitsandbytes' QuantState as the operands of one of our formats, and quantize to one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from inductor_q.capture.library import Damage, Packed, Stored
from inductor_q.exc import CorruptQuantState, MissingExtra, UnknownFormat
from inductor_q.formats import QuantFormat
from inductor_q.formats.bnb import (
    BNB_FORMATS,
    BNB_QUANT_TYPES,
    INT8,
    NESTED_BLOCKSIZE,
    bnb_format_name,
)


def packed(module: nn.Module, name: str) -> Packed | None:
    """Find the packed weight that `module` holds under a name: a parameter of bitsandbytes, one
    that its `replace_parameter_4bit` has parametrized, or plain bytes whose state the module kept.
    """
    children = vars(module).get("_modules", {})
    if "parametrizations" in children and name in children["parametrizations"]._modules:
        return packed(children["parametrizations"]._modules[name], "original")
    tensor = vars(module).get("_parameters", {}).get(name)
    if tensor is None:
        return None
    kind, state = type(tensor).__name__, getattr(tensor, "quant_state", None)
    if kind == "Int8Params":
        return _int8(module, tensor)
    if kind == "Params4bit":
        shape = tuple(getattr(state, "shape", None) or ())
        name = str(getattr(tensor, "quant_type", ""))
        if state is None:
            return Packed(name, shape, reason="bitsandbytes quantizes it when it moves to a device")
        return _four_bits(tensor, state, name, shape)
    if name == "weight":
        state = vars(module).get("quant_state")
    elif name == "original" and isinstance(module, nn.ModuleList):
        steps = (vars(step).get("quant_state") for step in children.values())
        state = next((found for found in steps if found is not None), None)
    if state is None:
        return None
    return _four_bits(tensor, state, str(state.quant_type), tuple(state.shape))


def _four_bits(tensor: Tensor, state: Any, name: str, shape: tuple[int, ...]) -> Packed:
    inner, block = getattr(state, "state2", None), getattr(state, "blocksize", None)
    nested = bool(getattr(state, "nested", False)) and not is_packed_for_cpu(state)
    format = f"{name}_b{block}" + ("_nested" if nested else "")
    held = (tensor, *(getattr(x, "absmax", None) for x in (state, inner)))
    return Packed(
        name,
        shape,
        partial(bnb_operands, tensor, state),
        layout=format if any(format == known.name for known in BNB_FORMATS) else "",
        parts=tuple(part for part in held if isinstance(part, Tensor)),
    )


def _int8(module: nn.Module, tensor: Any) -> Packed:
    """Read codes of LLM.int8; their scales move to the layer in its first call."""
    shape = tuple(tensor.shape)
    if tensor.dtype is not torch.int8:
        reason = "bitsandbytes quantizes it in its first call, or when it moves to a device"
        return Packed("int8", shape, reason=reason)
    held = (getattr(x, "SCB", None) for x in (tensor, vars(module).get("state")))
    absmax = next((x for x in held if x is not None), None)
    if absmax is None:
        return Packed("int8", shape, reason="the scales of its 8-bit codes are not with the layer")

    def read() -> Stored:
        return Stored([tensor.detach(), absmax], INT8.name, [*shape])

    return Packed("int8", shape, read, layout=INT8.name, parts=(tensor, absmax))


def bnb_operands(weight: Tensor, quant_state: Any) -> Stored:
    """Read a packed weight and its bitsandbytes `QuantState` as operands, format and shape.

    Raises:
        UnknownFormat, UnsupportedBlocksize, CorruptQuantState: the state is not one of
            bitsandbytes' 4-bit formats, or does not fit itself.
    """
    quant_type = getattr(quant_state, "quant_type", None)
    if quant_type not in BNB_QUANT_TYPES:
        raise UnknownFormat(name=str(quant_type), known=tuple(BNB_QUANT_TYPES))
    _check(quant_state)
    blocksize, shape = quant_state.blocksize, list(quant_state.shape)
    if is_packed_for_cpu(quant_state):
        codes, absmax = unpacked(weight, quant_state)
        return Stored([codes, absmax], bnb_format_name(quant_type, blocksize, False), shape)
    name = bnb_format_name(quant_type, blocksize, quant_state.nested)
    operands = [weight.detach(), quant_state.absmax]
    if quant_state.nested:
        inner = quant_state.state2
        if inner.blocksize != NESTED_BLOCKSIZE:
            raise CorruptQuantState(
                what="blocksize of the nested absmax",
                expected=NESTED_BLOCKSIZE,
                got=inner.blocksize,
                remedy="Quantize again with compress_statistics=True.",
            )
        operands += [inner.code, inner.absmax, quant_state.offset]
    return Stored(operands, name, shape)


def damaged(model: nn.Module) -> Iterator[Damage]:
    """Find the modules whose 4-bit weights have a state that lacks a part, and say which part.

    Such a weight cannot be decoded by anybody: eager mode, and Dynamo, which runs bitsandbytes'
    code before a backend is called, end in an AttributeError that names no layer.
    """
    for path, module in model.named_modules():
        parameters = vars(module).get("_parameters", {}).values()
        states = [getattr(parameter, "quant_state", None) for parameter in parameters]
        states.append(vars(module).get("quant_state"))  # which is that of its weight, as a rule
        for state in {id(state): state for state in states}.values():
            if getattr(state, "quant_type", None) in BNB_QUANT_TYPES:
                try:
                    _check(state)
                except CorruptQuantState as error:
                    yield path, error


def _check(state: Any) -> None:
    """Look whether a state has all that a weight is decoded by.

    Raises:
        CorruptQuantState: it has not.
    """
    for name, kind in (("blocksize", int), ("shape", tuple), ("absmax", Tensor)):
        _part(state, name, kind)
    if not is_packed_for_cpu(state) and _part(state, "nested", bool):
        inner = _part(state, "state2", object)
        for name, kind in (("blocksize", int), ("code", Tensor), ("absmax", Tensor)):
            _part(inner, name, kind, "nested ")
        _part(state, "offset", Tensor)


def _part(state: Any, name: str, kind: type, of: str = "") -> Any:
    """Return a part of a state.

    Raises:
        CorruptQuantState: the part is missing, or of another type.
    """
    value = getattr(state, name, None)
    if value is None or not isinstance(value, kind):
        raise CorruptQuantState(
            what=f"{of}{name}",
            expected=f"a {kind.__name__}",
            got="missing" if value is None else f"a {type(value).__name__}",
            remedy="Quantize the weight again, or load its state whole.",
        )
    return value


def is_packed_for_cpu(quant_state: Any) -> bool:
    """Whether bitsandbytes has packed the weight again, for its inference kernel on a CPU."""
    return bool(getattr(quant_state, "packing_format_for_cpu", False))


def unpacked(weight: Tensor, quant_state: Any) -> tuple[Tensor, Tensor]:
    """Return codes and plain absmax of a weight that is packed for the CPU, in the usual layout.

    bitsandbytes lays 32 rows together: a byte holds the codes of one row, or the next, in its lower
    half, and those of the row 16 further down in its upper half. It has rounded absmax to bfloat16.
    """
    n, k = _part(quant_state, "shape", tuple)
    packed = weight.detach().reshape(n // 32, k // 2, 32)
    codes = torch.cat([packed & 0xF, packed >> 4], -1).view(n // 32, k // 2, 32, 2)
    codes = codes.transpose(1, 2).reshape(-1, 2)
    absmax = _part(quant_state, "absmax", Tensor).t().reshape(-1).float()
    return (codes[:, 0] << 4 | codes[:, 1]).reshape(-1, 1), absmax


def quantize(weight: Tensor, fmt: QuantFormat) -> list[Tensor]:
    """Quantize `weight` to the operands of one of bitsandbytes' formats, as bitsandbytes does.

    Raises:
        MissingExtra.
    """
    try:
        from bitsandbytes.functional import quantize_4bit
    except ImportError:
        raise MissingExtra(package="bitsandbytes", extra="bnb", feature=fmt.name) from None
    scale = fmt.blockwise
    assert scale is not None, f"{fmt.name=}"
    packed, state = quantize_4bit(
        weight.contiguous(),
        blocksize=scale.block,
        quant_type=next(name for name, values in BNB_QUANT_TYPES.items() if values == fmt.codec),
        compress_statistics=scale.outer > 0,
    )
    return bnb_operands(packed, state).operands


def own_dtype(quant_state: Any) -> torch.dtype:
    """Return the dtype that a weight had before it was packed.

    Raises:
        CorruptQuantState: the state does not say.
    """
    dtype: torch.dtype = _part(quant_state, "dtype", torch.dtype)
    return dtype


__all__: Sequence[str] = [
    "bnb_operands",
    "damaged",
    "is_packed_for_cpu",
    "own_dtype",
    "packed",
    "quantize",
    "unpacked",
]
