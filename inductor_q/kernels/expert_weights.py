"""Decode the weights of one expert, of some, or of all, from a stack in any format."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from inductor_q.decode.eager import Eager
from inductor_q.formats import QuantFormat
from inductor_q.kernels.dequantize import write


class ExpertWeights:
    """A stack [E, rows, cols], dense or packed, that decodes the requested experts.

    An expert whose elements fill whole blocks is decoded from slices of the operands by the fastest
    kernel of the device; where blocks of nested scales span experts, the scales are decoded first,
    once. Where a block spans two experts, one alone is decoded element by element, and several
    are picked from all.
    """

    def __init__(
        self,
        operands: Sequence[Tensor],
        fmt: QuantFormat | None,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self._operands, self._fmt, self._dtype = list(operands), fmt, dtype
        self._shape = tuple(shape)
        self._numel = math.prod(self._shape[1:])
        columns = self._shape[-1]
        self._whole_blocks = fmt is not None and self._numel % fmt.plain.period(columns) == 0

    @functools.cached_property
    def _sliceable(self) -> tuple[list[Tensor], QuantFormat]:
        """Operands in which each expert has slices of its own, and their format."""
        assert self._fmt is not None and self._whole_blocks
        if self._numel % self._fmt.period(self._shape[-1]) == 0:
            return self._operands, self._fmt
        return _plain_scales(self._operands, self._fmt, self._shape)

    def __getitem__(self, expert: int) -> Tensor:
        """Decode one expert: [rows, cols]."""
        if self._fmt is None:
            return self._operands[0][expert].to(self._dtype)
        device = self._operands[0].device
        out = torch.empty(self._shape[1:], dtype=self._dtype, device=device)
        if self._whole_blocks:
            parts = [part if shared else part[expert] for part, shared in self._by_expert()]
            write(parts, self._sliceable[1], out)
        elif self._numel:
            index = torch.arange(self._numel, device=device) + expert * self._numel
            interpreter = _interpreter(self._operands, self._fmt, self._shape)
            values = self._fmt.decode(interpreter, index)
            out.copy_(values.reshape(out.shape))
        return out

    def some(self, experts: Tensor, out: Tensor | None = None) -> Tensor:
        """Decode the experts with the numbers `experts` [A]: [A, rows, cols].

        No more than A experts are decoded, unless a block spans two of them.

        Args:
            out: as in `all`.
        """
        if self._fmt is None:
            return _into(out, self._operands[0].index_select(0, experts), self._dtype)
        if not self._whole_blocks:
            return _into(out, self.all().index_select(0, experts), self._dtype)
        parts = [
            part if shared else part.index_select(0, experts).reshape(-1)
            for part, shared in self._by_expert()
        ]
        return self._decode(parts, self._sliceable[1], experts.shape[0], out)

    def share(self, experts: slice) -> list[Tensor] | None:
        """Copy the operands of some neighbours; None where a block spans two experts."""
        if self._fmt is None:
            return [self._operands[0][experts].clone()]
        if self._numel % self._fmt.period(self._shape[-1]):
            return None
        return [
            part if shared else part[experts].reshape(-1).clone()
            for part, shared in self._by_expert()
        ]

    def all(self, out: Tensor | None = None) -> Tensor:
        """Decode all experts: [E, rows, cols].

        Args:
            out: where to write them: strided evenly by row, for example a part of wider rows, or,
                in a format that is not decoded by rows, by expert; None for a tensor of their own.
        """
        if self._fmt is None:
            return _into(out, self._operands[0], self._dtype)
        return self._decode(self._operands, self._fmt, self._shape[0], out)

    def _decode(
        self, operands: Sequence[Tensor], fmt: QuantFormat, experts: int, out: Tensor | None
    ) -> Tensor:
        _, rows, cols = self._shape
        if out is None:
            device = operands[0].device
            out = torch.empty((experts, rows, cols), dtype=self._dtype, device=device)
        if not self._numel or not experts:
            return out
        if out.stride(0) == rows * out.stride(1):
            write(operands, fmt, out.view(-1, cols))
        else:
            assert not fmt.by_rows, "its rows would be no rows of a matrix"
            write(operands, fmt, out.view(experts, -1))
        return out

    def _by_expert(self) -> list[tuple[Tensor, bool]]:
        """Split operands into the experts' parts [E, ...]; a table that they share stays whole."""
        operands, fmt = self._sliceable
        one, two = fmt.requirements(self._shape[1:]), fmt.requirements((2, *self._shape[1:]))
        found = []
        for operand, of_two, tensor in zip(one, two, operands, strict=True):
            if operand == of_two:
                found.append((tensor, True))
                continue
            flat = tensor.reshape(-1)
            if not operand.dtypes:  # bytes, stored in any dtype
                flat = flat.view(torch.uint8)
            parts = flat[: self._shape[0] * operand.numel]
            found.append((parts.view(self._shape[0], operand.numel), False))
        return found


def _into(out: Tensor | None, values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype) if out is None else out.copy_(values)


def _plain_scales(
    operands: Sequence[Tensor], fmt: QuantFormat, shape: Sequence[int]
) -> tuple[list[Tensor], QuantFormat]:
    """Return the same weight with its scales in float32."""
    interpreter, numel = _interpreter(operands, fmt, shape), math.prod(shape)
    named = dict(zip(fmt.operands, operands, strict=True))
    for scale in fmt.shared:
        if (plain := scale.plain) is not None:
            blocks = torch.arange(numel // plain.block, device=operands[0].device)
            named[plain.operand] = scale.decode(interpreter, blocks * plain.block)
    return [named[name] for name in fmt.plain.operands], fmt.plain


def _interpreter(operands: Sequence[Tensor], fmt: QuantFormat, shape: Sequence[int]) -> Eager:
    named = dict(zip(fmt.operands, operands, strict=True))
    unit = getattr(torch, fmt.packing.unit)
    named["qweight"] = named["qweight"].reshape(-1).view(unit)
    return Eager(named, shape[-1], math.prod(shape[:-1]))
