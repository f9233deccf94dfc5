"""Layouts: maps of indices that say where codes and scales lie, with which formats compose.

An `Order` says where the codes of a few neighbours lie, a `Grid` where the scales of a matrix do.
A weight in another layout is the same format with another map, and every interpreter follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from inductor_q.formats.ops import I, Ops, V


class Order(Protocol):
    """Orders neighbouring codes in a byte or a wider word, from its lowest bits up."""

    def place(self, o: Ops[I, V], lane: I, n: int) -> I:
        """Find the place of the `lane`-th of `n` neighbours."""
        ...

    def places(self, n: int) -> tuple[int, ...]:
        """Return the same map in plain numbers: the places of all `n` neighbours."""
        ...


@dataclass(frozen=True)
class LowFirst:
    """The first of the neighbours lies lowest."""

    def place(self, o: Ops[I, V], lane: I, n: int) -> I:
        return lane

    def places(self, n: int) -> tuple[int, ...]:
        return tuple(range(n))


@dataclass(frozen=True)
class HighFirst:
    """The first of the neighbours lies highest."""

    def place(self, o: Ops[I, V], lane: I, n: int) -> I:
        return o.isub(n - 1, lane)

    def places(self, n: int) -> tuple[int, ...]:
        return tuple(reversed(range(n)))


@dataclass(frozen=True)
class Interleaved:
    """Neighbours are dealt out to `ways` parts of the word in turn.

    With 8 codes and two ways the first, third, fifth and seventh lie below the others (AWQ).
    """

    ways: int

    def place(self, o: Ops[I, V], lane: I, n: int) -> I:
        part = o.imul(o.imod(lane, self.ways), n // self.ways)
        return o.iadd(part, o.idiv(lane, self.ways))

    def places(self, n: int) -> tuple[int, ...]:
        return tuple(lane % self.ways * (n // self.ways) + lane // self.ways for lane in range(n))


LOW_FIRST = LowFirst()
HIGH_FIRST = HighFirst()


class Grid(Protocol):
    """Orders a matrix of scales in memory."""

    @property
    def rows(self) -> int:
        """Return how many rows lie together, apart from those that follow."""
        ...

    def numel(self, rows: int, columns: int) -> int:
        """Return how many elements hold the matrix, padding included."""
        ...

    def place(self, o: Ops[I, V], row: I, column: I, columns: I) -> I:
        """Find the place of an element of a matrix that has so many columns."""
        ...


@dataclass(frozen=True)
class RowMajor:
    """Rows follow each other."""

    rows = 1

    def numel(self, rows: int, columns: int) -> int:
        return rows * columns

    def place(self, o: Ops[I, V], row: I, column: I, columns: I) -> I:
        return o.iadd(o.imul(row, columns), column)


ROW_MAJOR = RowMajor()

#: More rows than any weight has: what lies together with so many cannot be cut by rows.
ALL_ROWS = 1 << 62


@dataclass(frozen=True)
class ByColumns:
    """Columns follow each other, and in a place lie as many numbers as `parts` says.

    part: is which of these the matrix has.
    multiples: are those to which rows and columns are padded.
    """

    parts: int
    part: int
    multiples: tuple[int, int] = (1, 1)
    rows = ALL_ROWS

    def numel(self, rows: int, columns: int) -> int:
        high, wide = self.multiples
        return -(-rows // high) * high * -(-columns // wide) * wide * self.parts

    def place(self, o: Ops[I, V], row: I, column: I, columns: I) -> I:
        high = self.multiples[0]
        rows = o.imul(o.idiv(o.iadd(o.rows(), high - 1), high), high)
        place = o.iadd(o.imul(column, rows), row)
        return o.iadd(o.imul(place, self.parts), self.part)


@dataclass(frozen=True)
class Tiles128x4:
    """Tiles have 128 rows and 4 columns, as NVIDIA's block-scaled tensor cores read them.

    In a tile of 512 elements four neighbours of a row follow each other; then come the rows that
    are 32 further, up to 128, and then the next row. Rows and columns are padded to whole tiles,
    which follow each other along the columns (cuBLAS, "1D block scaling factors layout").
    """

    rows = 128

    def numel(self, rows: int, columns: int) -> int:
        return -(-rows // 128) * -(-columns // 4) * 512

    def place(self, o: Ops[I, V], row: I, column: I, columns: I) -> I:
        across = o.idiv(o.iadd(columns, 3), 4)
        tile = o.iadd(o.imul(o.idiv(row, 128), across), o.idiv(column, 4))
        inside = o.iadd(o.imul(o.imod(row, 32), 16), o.imul(o.idiv(o.imod(row, 128), 32), 4))
        return o.iadd(o.imul(tile, 512), o.iadd(inside, o.imod(column, 4)))
