"""Calls of ops as kernels get them: what all have, and those of whole weights and of losses."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from inductor_q.formats import QuantFormat
from inductor_q.kernels.checks import check_device, expect

#: The name that stands for a weight that is not quantized: its one operand is the weight.
DENSE = "dense"


class Call:
    """The checked arguments of an op, as its providers get them."""

    @property
    def device(self) -> torch.device:
        """The device that it runs on."""
        raise NotImplementedError

    def empty(self) -> Any:
        """Return the result where there is nothing to compute, and None elsewhere."""
        return None

    def kind(self) -> Hashable:
        """Return what its provider is chosen and its launches are planned by (`Provider` says what
        that is), or None where each call is asked about anew. Fake tensors have none."""
        return None


def alike(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Return what a kernel goes by in tensors of shapes that it knows, besides their values."""
    return tuple(
        [t if t is None else (t.dtype, t.is_contiguous(), t.data_ptr() % 16) for t in tensors]
    )


def laid_out(*tensors: Tensor) -> tuple[Any, ...]:
    """Return what a kernel goes by in any tensors, besides their values."""
    return tuple([(t.dtype, t.shape, t.stride(), t.data_ptr() % 16) for t in tensors])


def aligned(*tensors: Tensor) -> bool:
    """Whether all addresses are multiples of 16 bytes."""
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return not bits % 16


#: The names that a schema has for the types of arguments.
_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "Sequence[Tensor]": "Tensor[]",
    "tuple[int, ...]": "SymInt[]",
    "torch.dtype": "ScalarType",
    **{name: name for name in ("bool", "float", "int", "str")},
}


def schema(op: str, call: Any, result: str) -> str:
    """Write the schema of an op whose arguments are the fields of `call`."""
    typed = ", ".join(f"{_TYPES[str(field.type)]} {field.name}" for field in fields(call))
    return f"{op}({typed}) -> {result}"


@dataclass(frozen=True)
class Dequantize(Call):
    """One call as a kernel gets it: write the values of `operands` into the matrix `out`."""

    operands: Sequence[Tensor]
    fmt: QuantFormat
    out: Tensor

    @property
    def device(self) -> torch.device:
        return self.out.device


@dataclass(frozen=True)
class QuantizeKbit(Call):
    """One call as a kernel gets it: the arguments of `quantize_kbit`, checked."""

    x: Tensor
    codebook: Tensor
    k: int
    absmax: str

    @property
    def device(self) -> torch.device:
        return self.x.device


@dataclass(frozen=True)
class Requantize(Call):
    """One call as a kernel gets it: write a weight's values over its rows' scales into `out`.

    `out` is in e4m3 or int8: [N, K], contiguous; or [K, N] where `transposed`, and then perhaps
    columns of a wider matrix.
    """

    operands: Sequence[Tensor]
    fmt: QuantFormat
    scale: Tensor  # [N] in float32
    out: Tensor
    transposed: bool

    @property
    def device(self) -> torch.device:
        return self.out.device

    def kind(self) -> Hashable:
        given = alike(self.scale, *self.operands)
        return self.out.device, self.fmt, self.transposed, laid_out(self.out), given

    def scattered(self) -> str:
        """Return why no kernel takes the tensors as they lie in memory; empty where one may."""
        one_row = self.out[0] if self.transposed and len(self.out) else self.out
        if all(t.is_contiguous() for t in (*self.operands, self.scale, one_row)):
            return ""
        return "a tensor is not contiguous"

    def parts(self, rows: Sequence[int]) -> Iterator[Requantize]:
        """Split the call into one for each weight, of so many rows: the operands are those of all
        weights in turn. Not transposed, the weights lie below each other, else side by side."""
        if not rows:
            yield self
            return
        each, axis = len(self.fmt.operands), 1 if self.transposed else 0
        outs, scales = self.out.split(tuple(rows), axis), self.scale.split(tuple(rows))
        for i, (out, scale) in enumerate(zip(outs, scales, strict=True)):
            operands = self.operands[i * each : (i + 1) * each]
            yield replace(self, operands=operands, scale=scale, out=out)


@dataclass(frozen=True, kw_only=True)
class SoftmaxLoss(Call):
    """Rows of logits, whose losses a kernel writes; then gradients take the place of the logits.

    The loss of a row is `logsumexp(row) - row[label]` in float32: 0 where the label is
    `ignore_index`, and NaN where it is no column. Its gradient is written where a `scale` is given,
    multiplied by it.
    """

    logits: Tensor  # [R, V], overwritten by the gradients
    labels: Tensor  # [R] int64
    losses: Tensor  # [R] float32, written
    scale: Tensor | None  # float32, one number
    ignore_index: int

    @property
    def device(self) -> torch.device:
        return self.logits.device


@dataclass(frozen=True)
class AddProduct(Call):
    """One call as a kernel gets it: add `alpha * (a @ b)` to `base`, rounded once."""

    base: Tensor  # [M, N], overwritten by the sum
    a: Tensor  # [M, K]
    b: Tensor  # [K, N]
    alpha: float = 1.0

    @property
    def device(self) -> torch.device:
        return self.base.device

    def empty(self) -> Tensor | None:
        return None if self.base.numel() else self.base

    def kind(self) -> Hashable:
        return self.base.device, self.alpha, laid_out(self.base, self.a, self.b)

    def check(self) -> None:
        base, a, b = self.base, self.a, self.b
        check_device("factor of a product that is added", [a, b], base)
        expect("the sum", base.shape, (a.shape[0], b.shape[-1]))
        expect("the first factor", a.shape, (base.shape[0], b.shape[0]))
        expect("the second factor", b.shape, (a.shape[-1], base.shape[-1]))


@dataclass(frozen=True)
class AdapterGrads(Call):
    """One call as a kernel gets it: write the two products of `grad` into `of_p` and `of_b`."""

    grad: Tensor  # [M, N]
    p: Tensor  # [M, r]
    b: Tensor  # [N, r]
    factor_p: float
    factor_b: float
    of_p: Tensor  # [M, r or more], overwritten by factor_p * grad @ b, with zeros behind
    of_b: Tensor  # [N, r], overwritten by factor_b * grad' @ p

    @property
    def device(self) -> torch.device:
        return self.grad.device

    def kind(self) -> Hashable:
        layout = laid_out(self.grad, self.p, self.b, self.of_p, self.of_b)
        return self.grad.device, self.factor_p, self.factor_b, layout

    def check(self) -> None:
        grad, p, b = self.grad, self.p, self.b
        check_device("factor of a gradient", [p, b], grad)
        expect("the gradient", grad.shape, (p.shape[0], b.shape[0]))
        expect("the projection", p.shape, (grad.shape[0], b.shape[-1]))
        expect("B", b.shape, (grad.shape[-1], p.shape[-1]))
