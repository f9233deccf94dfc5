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
    def nibbles(self) -> tuple[int, int] | None:
        """Return the right shifts that bring down the two codes of a byte, or None."""
        ...

    @property
    def planes(self) -> int:
        """Return how many bit planes a block of 32 codes has; 0 for another packing."""
        ...

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Return where the codes of as many neighbours in a row lie in the words that `words`
        loads: which word, and its lowest bit. Empty for another packing."""
        ...

    def operands(self, rows: int, columns: int) -> tuple[Operand, ...]:
        """Describe what holds the codes of a weight."""
        ...

    def period(self, columns: int) -> int:
        """Return a number of elements at whose multiples codes can be cut."""
        ...

    def code(self, o: Ops[I, V], i: I) -> V:
        """Find the code of element `i`."""
        ...

    def words(self, o: Ops[I, V], i: I) -> tuple[V, ...]:
        """Load the words that the neighbours from element `i` on have to themselves, where there
        are `places`; `i` and the weight's columns are multiples of their number."""
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
    places = ()

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

    def operands(self, rows: int, columns: int) -> tuple[Operand, ...]:
        return (Operand("qweight", -(-rows * columns // self.block) * self.word, ()),)

    def period(self, columns: int) -> int:
        return self.block

    def code(self, o: Ops[I, V], i: I) -> V:
        if self.bits == 8 and self.word == 1:
            return o.to_int(o.load("qweight", i))
        byte, lane = o.idiv(i, self.block), o.imod(i, self.block)
        lane = self.order.place(o, lane, self.block)
        if self.word > 1:
            byte = o.iadd(o.imul(byte, self.word), o.idiv(lane, self.per_byte))
            lane = o.imod(lane, self.per_byte)
        return o.bits(o.load("qweight", byte), lane, self.bits)

    def words(self, o: Ops[I, V], i: I) -> tuple[V, ...]:
        return ()


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
    places = ()

    @property
    def planes(self) -> int:
        return self.bits

    def operands(self, rows: int, columns: int) -> tuple[Operand, ...]:
        words = -(-rows * columns // self.block) * self.bits
        return (Operand("qweight", words, (self.unit,)),)

    def period(self, columns: int) -> int:
        return self.block

    def code(self, o: Ops[I, V], i: I) -> V:
        first = o.imul(o.idiv(i, self.block), self.bits)
        lane = o.imod(i, self.block)
        code = o.bits(o.load("qweight", first), lane, 1)
        for p in range(1, self.bits):
            bit = o.bits(o.load("qweight", o.iadd(first, p)), lane, 1)
            code = o.with_bit(code, bit, p)
        return code

    def words(self, o: Ops[I, V], i: I) -> tuple[V, ...]:
        return ()


@dataclass(frozen=True)
class MmaTiles:
    """4-bit codes as `aten::_convert_weight_to_int4pack` lays them out, of 8 inner tiles.

    A tile has 8 rows and 128 columns. Thread t of a warp has a row, t // 4, and a word for each of
    four parts of 32 columns, with what it gives to two products of 16: columns 2 (t % 4) + 0, 1, 8
    and 9 of each. In a word the even ones of these eight lie below the others. Rows are padded to
    8, columns to 1024. `[rows / 8, columns / 128, 32, 4]` words of int32 hold a weight.
    """

    bits = 4
    unit = "int32"
    nibbles = None
    planes = 0
    #: Those of 32 columns, whose words four threads have.
    places = tuple((e % 8 // 2, 4 * (e // 8 + 4 * (e % 2))) for e in range(32))

    def operands(self, rows: int, columns: int) -> tuple[Operand, ...]:
        return (Operand("qweight", -(-rows // 8) * -(-columns // 1024) * 1024, (self.unit,)),)

    def period(self, columns: int) -> int:
        return 8 * columns

    def code(self, o: Ops[I, V], i: I) -> V:
        column = o.column(i)
        word = o.iadd(self._first(o, i), o.imul(o.idiv(o.imod(column, 8), 2), 4))
        # of the two products, then of columns 0 and 8 of one; an odd column lies 4 further up
        place = o.iadd(o.idiv(o.imod(column, 32), 8), o.imul(o.imod(column, 2), 4))
        return o.bits(o.load("qweight", word), place, self.bits)

    def words(self, o: Ops[I, V], i: I) -> tuple[V, ...]:
        first = self._first(o, i)
        return tuple(o.load("qweight", o.iadd(first, 4 * thread)) for thread in range(4))

    def _first(self, o: Ops[I, V], i: I) -> I:
        """Find the word that the first of four threads has for the part of element `i`."""
        row, column = o.row(i), o.column(i)
        across = o.imul(o.idiv(o.iadd(o.columns(), 1023), 1024), 8)
        tile = o.iadd(o.imul(o.idiv(row, 8), across), o.idiv(column, 128))
        of_row = o.iadd(o.imul(tile, 8), o.imod(row, 8))
        return o.iadd(o.imul(of_row, 16), o.idiv(o.imod(column, 128), 32))
