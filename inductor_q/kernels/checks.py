"""Check the arguments of a call: devices, shapes, and the operands of a quantized weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inductor_q.exc import CorruptQuantState, WrongDevice, WrongDtype, WrongShape
from inductor_q.formats import QuantFormat
from inductor_q.formats.operand import FLOATS, Operand

DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in FLOATS)


_REMEDY = "The state belongs to another weight, blocksize or format: quantize the weight again."


def expect(what: str, got: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(got) != tuple(expected):
        raise WrongShape(what=what, expected=tuple(expected), got=tuple(got))


def check_device(what: str, tensors: Sequence[Tensor], x: Tensor) -> None:
    """Raise unless `tensors` lie beside `x`: with one on "meta", torch would call the fake."""
    for tensor in tensors:
        if tensor.device != x.device:
            raise WrongDevice(what=what, expected=x.device, got=tensor.device)


def check_operands(
    operands: Sequence[Tensor], fmt: QuantFormat, shape: Sequence[int], dtype: torch.dtype
) -> None:
    """Raise unless `operands` can hold a weight of `shape` in format `fmt`."""
    if dtype not in DTYPES:
        raise WrongDtype(what="dequantized weight", expected=DTYPES, got=dtype)
    if len(operands) != len(fmt.operands):
        raise CorruptQuantState(
            what=f"number of operands of {fmt.name}",
            expected=f"{len(fmt.operands)} ({', '.join(fmt.operands)})",
            got=len(operands),
            remedy="Pass the operands in the order of FORMATS[format].operands.",
        )
    devices = {t.device for t in operands}
    if len(devices) > 1:
        raise CorruptQuantState(
            what=f"device of the operands of {fmt.name}",
            expected="one device",
            got=", ".join(
                f"{n} on {t.device}" for n, t in zip(fmt.operands, operands, strict=True)
            ),
            remedy="Move the quantization state with the weight: module.to(device).",
        )
    for operand, tensor in zip(fmt.requirements(shape), operands, strict=True):
        if operand.dtypes:
            _check_typed(operand, tensor)
        else:
            _check_bytes(operand, tensor, shape)


def _check_bytes(operand: Operand, tensor: Tensor, shape: Sequence[int]) -> None:
    packed = tensor.numel() * tensor.element_size()
    # A wider storage dtype may round the byte count up to its own size.
    if not operand.numel <= packed < operand.numel + tensor.element_size():
        raise CorruptQuantState(
            what="packed weight",
            expected=f"{operand.numel} bytes for shape {tuple(shape)}",
            got=f"{packed} bytes",
            remedy=_REMEDY,
        )


def _check_typed(operand: Operand, tensor: Tensor) -> None:
    if tensor.numel() != operand.numel:
        raise CorruptQuantState(
            what=f"number of elements of {operand.name}",
            expected=operand.numel,
            got=tensor.numel(),
            remedy=_REMEDY,
        )
    dtypes = tuple(getattr(torch, name) for name in operand.dtypes)
    if tensor.dtype in dtypes:
        return
    if operand.dtypes == FLOATS:
        raise WrongDtype(what=operand.name, expected=dtypes, got=tensor.dtype)
    raise CorruptQuantState(  # codes, or a scale that the format promises in one dtype
        what=f"dtype of {operand.name}",
        expected=" or ".join(map(str, dtypes)),
        got=tensor.dtype,
        remedy=_REMEDY,
    )
