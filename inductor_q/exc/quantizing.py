"""Weights that cannot be quantized, and formats that cannot be written."""

from __future__ import annotations

from collections.abc import Collection

from inductor_q.exc.base import QfuseError, first_few


class NotAModel(QfuseError, TypeError):
    """What is to be quantized is neither a module nor says which one to make."""

    found: str
    message = (
        "cannot quantize a {found}: expected a torch.nn.Module, or transformers' configuration of "
        "a causal language model beside checkpoint=..."
    )


class NothingToQuantize(QfuseError, ValueError):
    """A quantizer would have changed nothing in the model; `found` says what is there."""

    model: str
    found: str
    message = "nothing to quantize in {model}: {found}"


class AlreadyQuantized(QfuseError, ValueError):
    """The weights are codes already and cannot be quantized as if they were values."""

    what: str
    found: str
    remedy: str
    message = "{what} is quantized already: {found}. {remedy}"


class WrongScheme(QfuseError, ValueError):
    """What is asked of `inductor_q.quantize` is no format, or none that can be written."""

    asked: object
    problem: str
    message = "cannot quantize to {asked!r}: {problem}"


class NoQuantizer(QfuseError, ValueError):
    """The format can only be read: weights in it come from elsewhere."""

    name: str
    what: str
    known: Collection[str]
    message = (
        "{name} is a format to read; nothing here quantizes {what} to it. Quantize to {some!j}"
    )

    @property
    def some(self) -> Collection[str]:
        return first_few(self.known)


class UnsupportedBlocksize(QfuseError, ValueError):
    blocksize: int
    supported: Collection[int]
    message = "blocksize {blocksize} is not supported. Quantize again with one of {supported!j}"


class UnsupportedBits(QfuseError, ValueError):
    k: object
    supported: Collection[int]
    message = "k={k!r} bits are not supported. Quantize with one of {supported!j}"


class WrongCodebook(QfuseError, ValueError):
    k: int
    problem: str
    message = (
        "codebook of k={k}: {problem}. It takes {size} finite float32 values in ascending order "
        "(duplicates are allowed)"
    )

    @property
    def size(self) -> int:
        return int(2**self.k)


class WrongBudget(QfuseError, ValueError):
    """No assignment of K reaches the requested number of bits per element."""

    bits: float
    low: float
    high: float
    message = "a budget of {bits:g} bits an element is not between {low:g} and {high:g}"


class NoValues(QfuseError, ValueError):
    """The tensor is on the meta device, which has shapes and no numbers."""

    what: str
    message = (
        "{what} is on the meta device, so it has no values to quantize. Give checkpoint=..., from "
        "which weights are read one at a time, or load the model before, such as by "
        "inductor_q.load_checkpoint"
    )


class NotFinite(QfuseError, ValueError):
    """The tensor has NaN or infinity, which would spoil its whole block."""

    what: str
    message = "{what} contains NaN or infinity. Repair it, or leave it out with skip=[...]"


class ScaleOutOfRange(QfuseError, ValueError):
    """The tensor is too large or too small for the number format of its scales."""

    what: str
    value: float
    absmax: str
    low: float
    high: float
    message = (
        "{what} reaches {value:.3g}, outside of the {low:.3g} to {high:.3g} that absmax={absmax!r} "
        "scales hold in full precision. Use another absmax, or scale the tensor"
    )
