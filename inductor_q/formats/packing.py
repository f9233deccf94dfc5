"""Packings say where the code of element `i` lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from inductor_q.formats.layout import LOW_FIRST, Order
from inductor_q.formats.operand import Operand
from inductor_q.formats.ops import I, Ops, V


class Packing(Protocol):
    """The codes of a weight in the operand `qweight`."""

    @property
    def bits(self) -> int:
        """Return how many bits a code has."""
        ...

    @property
    def unit(self) -> str:
        """Return the dtype, by torch's name, of the units of `qweight` that `code` loads."""
        ...

    @property
    def block(self) -> int:
        """Return how many neighbours have codes that lie together, apart from those of others."""
        ...

    @property
    def nibbles(self) -> tuple[int, int] | None:
        """Return the right shifts that bring down the two codes of a byte, or None."""
        ...

    @property
    def planes(self) -> int:
        """Return how many bit planes a block of 32 codes has; 0 for another packing."""
        ...

    def operands(self, numel: int) -> tuple[Operand, ...]:
        """Describe what holds `numel` codes."""
        ...

    def code(self, o: Ops[I, V], i: I) -> V:
        """Find the code of element `i`."""
        ...


@dataclass(frozen=True)
class BytePacking:
    """Each byte holds `8 // bits` codes; bytes are stored in any dtype.

    order: is that of the codes in each `word` bytes, of which the first is the lowest.
    """

    bits: int
    order: Order = LOW_FIRST
    word: int = 1
    unit = "uint8"
    planes = 0

    @property
    def per_byte(self) -> int:
        return 8 // self.bits

    @property
    def block(self) -> int:
        return self.per_byte * self.word

    @property
    def nibbles(self) -> tuple[int, int] | None:
        if self.bits != 4 or self.word != 1:
            return None
        first, second = self.order.places(2)
        return 4 * first, 4 * second

    def operands(self, numel: int) -> tuple[Operand, ...]:
        return (Operand("qweight", -(-numel // self.block) * self.word, ()),)

    def code(self, o: Ops[I, V], i: I) -> V:
        if self.bits == 8 and self.word == 1:
            return o.to_int(o.load("qweight", i))
        byte, lane = o.idiv(i, self.block), o.imod(i, self.block)
        lane = self.order.place(o, lane, self.block)
        if self.word > 1:
            byte = o.iadd(o.imul(byte, self.word), o.idiv(lane, self.per_byte))
            lane = o.imod(lane, self.per_byte)
        return o.bits(o.load("qweight", byte), lane, self.bits)


@dataclass(frozen=True)
class BitPlanes:
    """Blocks of 32 codes as `bits` int32 words: bit j of word p is bit p of the block's j-th code.

    A word is what a warp gets from `__ballot_sync` of one bit. The last block is whole; its missing
    elements have code 0.
    """

    bits: int
    unit = "int32"
    block = 32
    nibbles = None

    @property
    def planes(self) -> int:
        return self.bits

    def operands(self, numel: int) -> tuple[Operand, ...]:
        return (Operand("qweight", -(-numel // self.block) * self.bits, (self.unit,)),)

    def code(self, o: Ops[I, V], i: I) -> V:
        first = o.imul(o.idiv(i, self.block), self.bits)
        lane = o.imod(i, self.block)
        code = o.bits(o.load("qweight", first), lane, 1)
        for p in range(1, self.bits):
            bit = o.bits(o.load("qweight", o.iadd(first, p)), lane, 1)
            code = o.with_bit(code, bit, p)
        return code
