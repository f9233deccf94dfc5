"""The weights of one expert, or of all, out of a stack in any format."""

from __future__ import annotations

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
    """A stack [E, rows, cols], dense or packed, that is decoded an expert at a time.

    An expert whose elements fill whole blocks is decoded from slices of the operands by the fastest
    kernel of the device; nested scales are decoded once, since their own blocks may span experts.
    Where a block spans two experts, one alone is decoded element by element.
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
        if fmt is not None and self._whole_blocks and isinstance(fmt.scale, NestedScale):
            self._operands, self._fmt = _plain_scales(operands, fmt, math.prod(shape))

    def __getitem__(self, expert: int) -> Tensor:
        """[rows, cols] of one expert."""
        if self._fmt is None:
            return self._operands[0][expert].to(self._dtype)
        device = self._operands[0].device
        out = torch.empty(self._shape[1:], dtype=self._dtype, device=device)
        if self._whole_blocks:
            write(self._slices(self._fmt, expert), self._fmt, out)
        elif self._numel:
            index = torch.arange(self._numel, device=device) + expert * self._numel
            values = self._fmt.decode(_interpreter(self._operands, self._fmt), index)
            out.copy_(values.reshape(out.shape))
        return out

    def all(self) -> Tensor:
        """[E, rows, cols]."""
        if self._fmt is None:
            return self._operands[0].to(self._dtype)
        device = self._operands[0].device
        out = torch.empty(self._shape, dtype=self._dtype, device=device)
        write(self._operands, self._fmt, out.view(-1, self._shape[-1]))
        return out

    def _slices(self, fmt: QuantFormat, expert: int) -> list[Tensor]:
        one, two = fmt.requirements(self._numel), fmt.requirements(2 * self._numel)
        found = []
        for operand, of_two, tensor in zip(one, two, self._operands, strict=True):
            flat = tensor.reshape(-1)
            if not operand.dtypes:  # bytes, stored in any dtype
                flat = flat.view(torch.uint8)
            start = 0 if operand == of_two else expert * operand.numel  # a table is shared
            found.append(flat[start : start + operand.numel])
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
