"""The weights of one expert, of some, or of all, out of a stack in any format."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from inductor_q.decode.eager import Eager
from inductor_q.formats import QuantFormat
from inductor_q.formats.scale import BlockScale, NestedScale
from inductor_q.ops.dequantize import write


class ExpertWeights:
    """A stack [E, rows, cols], dense or packed, of which what is asked for is decoded.

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
        self._whole_blocks = fmt is not None and self._numel % fmt.scale.block == 0

    @functools.cached_property
    def _sliceable(self) -> tuple[list[Tensor], QuantFormat]:
        """Operands and their format, of which each expert has slices of its own."""
        assert self._fmt is not None and self._whole_blocks
        scale = self._fmt.scale
        if not isinstance(scale, NestedScale):
            return self._operands, self._fmt
        if self._numel % (scale.block * scale.outer.block) == 0:
            return self._operands, self._fmt
        return _plain_scales(self._operands, self._fmt, math.prod(self._shape))

    def __getitem__(self, expert: int) -> Tensor:
        """[rows, cols] of one expert."""
        if self._fmt is None:
            return self._operands[0][expert].to(self._dtype)
        device = self._operands[0].device
        out = torch.empty(self._shape[1:], dtype=self._dtype, device=device)
        if self._whole_blocks:
            parts = [part if shared else part[expert] for part, shared in self._by_expert()]
            write(parts, self._sliceable[1], out)
        elif self._numel:
            index = torch.arange(self._numel, device=device) + expert * self._numel
            values = self._fmt.decode(_interpreter(self._operands, self._fmt), index)
            out.copy_(values.reshape(out.shape))
        return out

    def some(self, experts: Tensor) -> Tensor:
        """[A, rows, cols] of the experts with the numbers `experts` [A].

        No more than A experts are decoded, unless a block spans two of them.
        """
        if self._fmt is None:
            return self._operands[0].index_select(0, experts).to(self._dtype)
        if not self._whole_blocks:
            return self.all().index_select(0, experts)
        parts = [
            part if shared else part.index_select(0, experts).reshape(-1)
            for part, shared in self._by_expert()
        ]
        shape = (experts.shape[0], *self._shape[1:])
        out = torch.empty(shape, dtype=self._dtype, device=parts[0].device)
        write(parts, self._sliceable[1], out.view(-1, self._shape[-1]))
        return out

    def all(self) -> Tensor:
        """[E, rows, cols]."""
        if self._fmt is None:
            return self._operands[0].to(self._dtype)
        device = self._operands[0].device
        out = torch.empty(self._shape, dtype=self._dtype, device=device)
        write(self._operands, self._fmt, out.view(-1, self._shape[-1]))
        return out

    def _by_expert(self) -> list[tuple[Tensor, bool]]:
        """Of each operand the parts of the experts [E, ...], or a table that they share."""
        operands, fmt = self._sliceable
        one, two = fmt.requirements(self._numel), fmt.requirements(2 * self._numel)
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


def _plain_scales(
    operands: Sequence[Tensor], fmt: QuantFormat, numel: int
) -> tuple[list[Tensor], QuantFormat]:
    """The same weight with its scales in float32."""
    assert isinstance(fmt.scale, NestedScale)
    plain = replace(
        fmt, name=f"{fmt.name}_plain", scale=BlockScale(fmt.scale.operand, fmt.scale.block)
    )
    blocks = torch.arange(numel // fmt.scale.block, device=operands[0].device)
    absmax = fmt.scale.decode(_interpreter(operands, fmt), blocks * fmt.scale.block)
    named = dict(zip(fmt.operands, operands, strict=True)) | {fmt.scale.operand: absmax}
    return [named[name] for name in plain.operands], plain


def _interpreter(operands: Sequence[Tensor], fmt: QuantFormat) -> Eager:
    named = dict(zip(fmt.operands, operands, strict=True))
    unit = getattr(torch, fmt.packing.unit)
    return Eager(named | {"qweight": named["qweight"].reshape(-1).view(unit)})
