"""Which scale an element has: flat index -> float32 scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from inductor_q.formats.codec import Codec
from inductor_q.formats.operand import FLOATS, Operand


class Scale(Protocol):
    @property
    def block(self) -> int:
        """Consecutive elements that share a scale."""
        ...

    def operands(self, numel: int) -> tuple[Operand, ...]:
        """What holds the scales of `numel` elements."""
        ...

    def decode(self, o: Any, i: Any) -> Any: ...


@dataclass(frozen=True)
class BlockScale:
    """One float scale per `block` consecutive elements."""

    operand: str
    block: int
    dtypes: tuple[str, ...] = FLOATS

    def operands(self, numel: int) -> tuple[Operand, ...]:
        return (Operand(self.operand, -(-numel // self.block), self.dtypes),)

    def decode(self, o: Any, i: Any) -> Any:
        return o.to_float(o.load(self.operand, o.idiv(i, self.block)))


@dataclass(frozen=True)
class MinifloatScale:
    """One unsigned 8-bit float per `block` consecutive elements: no sign, no infinity, no NaN.

    With m of `mantissa_bits` bits and e the bits above them, the value is
    2^(e - bias) * (1 + m / 2^mantissa_bits), and for e = 0 2^(1 - bias) * m / 2^mantissa_bits.
    """

    operand: str
    block: int
    mantissa_bits: int
    bias: int

    @property
    def smallest_normal(self) -> float:
        return math.ldexp(1.0, 1 - self.bias)

    @property
    def largest(self) -> float:
        exponent_bits, m = 8 - self.mantissa_bits, 2**self.mantissa_bits
        return math.ldexp(2 - 1 / m, 2**exponent_bits - 1 - self.bias)

    def operands(self, numel: int) -> tuple[Operand, ...]:
        return (Operand(self.operand, -(-numel // self.block), ("uint8",)),)

    def decode(self, o: Any, i: Any) -> Any:
        code = o.load(self.operand, o.idiv(i, self.block))
        return o.minifloat(code, self.mantissa_bits, self.bias)


@dataclass(frozen=True)
class NestedScale:
    """A scale that is quantized itself: `codec(scale code) * outer + offset`.

    QLoRA's double quantization, https://arxiv.org/abs/2305.14314, section 3."""

    operand: str
    block: int
    codec: Codec
    outer: BlockScale
    offset: str

    def operands(self, numel: int) -> tuple[Operand, ...]:
        blocks = -(-numel // self.block)
        return (
            Operand(self.operand, blocks, ("uint8",)),
            *self.codec.operands(),
            *self.outer.operands(blocks),
            Operand(self.offset, 1, FLOATS),
        )

    def decode(self, o: Any, i: Any) -> Any:
        b = o.idiv(i, self.block)
        value = self.codec.decode(o, o.load(self.operand, b))
        return o.add(o.mul(value, self.outer.decode(o, b)), o.load(self.offset, o.zero(b)))
