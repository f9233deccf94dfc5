"""Where the code of element `i` lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from inductor_q.formats.operand import Operand


class Packing(Protocol):
    """The codes of a weight in the operand `qweight`."""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        ...

    @property
    def unit(self) -> str:
        """The dtype, by torch's name, of the units of `qweight` that `code` loads."""
        ...

    def operands(self, numel: int) -> tuple[Operand, ...]:
        """What holds `numel` codes."""
        ...

    def code(self, o: Any, i: Any) -> Any:
        """The code of element `i`."""
        ...


@dataclass(frozen=True)
class BytePacking:
    """`8 // bits` codes in each byte, stored in any dtype."""

    bits: int
    high_first: bool
    unit = "uint8"

    @property
    def per_byte(self) -> int:
        return 8 // self.bits

    def operands(self, numel: int) -> tuple[Operand, ...]:
        return (Operand("qweight", -(-numel // self.per_byte), ()),)

    def shift(self, lane: int) -> int:
        """The right shift that brings the code of a byte's `lane`-th element down."""
        return self.bits * (self.per_byte - 1 - lane if self.high_first else lane)

    def code(self, o: Any, i: Any) -> Any:
        byte = o.load("qweight", o.idiv(i, self.per_byte))
        lane = o.imod(i, self.per_byte)
        if self.high_first:
            lane = o.isub(self.per_byte - 1, lane)
        return o.bits(byte, lane, self.bits)


@dataclass(frozen=True)
class BitPlanes:
    """Blocks of 32 codes as `bits` int32 words: bit j of word p is bit p of the block's j-th code.

    What a warp gets from `__ballot_sync` of each bit. The last block is whole; its missing elements
    have code 0.
    """

    bits: int
    unit = "int32"
    block = 32

    def operands(self, numel: int) -> tuple[Operand, ...]:
        return (Operand("qweight", -(-numel // self.block) * self.bits, (self.unit,)),)

    def code(self, o: Any, i: Any) -> Any:
        first = o.imul(o.idiv(i, self.block), self.bits)
        lane = o.imod(i, self.block)
        code = o.bits(o.load("qweight", first), lane, 1)
        for p in range(1, self.bits):
            bit = o.bits(o.load("qweight", o.iadd(first, p)), lane, 1)
            code = o.with_bit(code, bit, p)
        return code
