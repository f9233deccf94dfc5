"""Tensors and quantization states that are not what a kernel or a decoder reads."""

from __future__ import annotations

from inductor_q.exc.base import QfuseError


class CorruptQuantState(QfuseError, ValueError):
    """A quantization state does not fit its packed tensor."""

    what: str
    expected: object
    got: object
    remedy: str
    message = "corrupt quantization state: {what} should be {expected}, is {got}. {remedy}"


class UnreadWeight(QfuseError, ValueError):
    """None of our formats is the one in which a library holds a weight."""

    kind: str
    reason: str
    message = (
        "cannot decode {kind}: {reason}. Ask its library for the values, or quantize the "
        "original weight by inductor_q.quantize, whose formats are all read"
    )


class _WrongTensor(QfuseError):
    what: str
    expected: object
    got: object


class WrongDevice(_WrongTensor, ValueError):
    message = "{what} is on {got}, expected {expected}. Move it with .to(...)"


class WrongDtype(_WrongTensor, TypeError):
    message = "{what} is {got}, expected {expected}. Cast it with .to(...)"


class WrongShape(_WrongTensor, ValueError):
    message = (
        "{what} has shape {got}, expected {expected}. Check which weight the operands belong to"
    )
