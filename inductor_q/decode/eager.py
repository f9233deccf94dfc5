"""Eager torch: the reference that every other interpreter is checked against."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Eager:
    """Runs a decode on tensors; an index is an int64 tensor of flat element numbers."""

    def __init__(self, operands: Mapping[str, Tensor]) -> None:
        self._operands = operands

    def load(self, name: str, i: Tensor) -> Tensor:
        return self._operands[name].reshape(-1)[i]

    def gather(self, name: str, code: Tensor, size: int) -> Tensor:
        return self._operands[name].reshape(-1)[code.long()]

    def codebook(self, values: tuple[float, ...], code: Tensor) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=code.device)[code.long()]

    def idiv(self, a: Tensor, n: int) -> Tensor:
        return a // n

    def imod(self, a: Tensor, n: int) -> Tensor:
        return a % n

    def isub(self, a: int, b: Tensor) -> Tensor:
        return a - b

    def iadd(self, a: Tensor, n: int) -> Tensor:
        return a + n

    def imul(self, a: Tensor, n: int) -> Tensor:
        return a * n

    def zero(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like)

    def bits(self, byte: Tensor, lane: Tensor, bits: int) -> Tensor:
        return (byte.to(torch.int32) >> (lane * bits).to(torch.int32)) & ((1 << bits) - 1)

    def with_bit(self, code: Tensor, bit: Tensor, position: int) -> Tensor:
        return code | (bit << position)

    def minifloat(self, code: Tensor, mantissa_bits: int, bias: int) -> Tensor:
        code = code.to(torch.int32)
        normal = (code + ((127 - bias) << mantissa_bits)) << (23 - mantissa_bits)
        subnormal = code.to(torch.float32) * 2.0 ** (1 - bias - mantissa_bits)
        return torch.where(code < (1 << mantissa_bits), subnormal, normal.view(torch.float32))

    def to_float(self, a: Tensor) -> Tensor:
        return a.to(torch.float32)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b
