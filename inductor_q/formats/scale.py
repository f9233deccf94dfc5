"""Scales and zero points: what neighbouring elements share, as a float32 number per index."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from inductor_q.formats.codec import Codec, Number, rounded
from inductor_q.formats.layout import ROW_MAJOR, Grid
from inductor_q.formats.operand import FLOATS, Operand
from inductor_q.formats.ops import I, Ops, V

FLOAT = Number()


@dataclass(frozen=True)
class Blockwise:
    """Describes a scale per `block` consecutive elements to kernels that have code of their own.

    operands: those of the scale; a nested one has its codes, its table, the outer scale and the
        offset, in that order.
    codec: says what the first operand holds.
    outer: is how many scales share an outer one, or 0 where the scale is not nested.
    """

    block: int
    operands: tuple[str, ...]
    codec: Codec
    outer: int = 0

    @property
    def is_float(self) -> bool:
        """Whether scales are floating-point numbers that are stored as they are."""
        return set(self.codec.dtypes) <= set(FLOATS)


class Scale(Protocol):
    """Maps an index to something that neighbours share."""

    @property
    def blockwise(self) -> Blockwise | None:
        """Describe this scale to kernels that may know its kind; None where none does."""
        return None

    @property
    def grouped(self) -> Blockwise | None:
        """Describe numbers that are stored as they are, row by row, one for `block` columns; None
        for another scale."""
        return None

    @property
    def plain(self) -> BlockScale | None:
        """Return a scale whose operand stores the values of this one, or None for this one itself.

        A stack of weights is cut up with it where its own scales span two of them.
        """
        return None

    def operands(self, rows: int, columns: int) -> tuple[Operand, ...]:
        """Describe what holds the scales of a weight."""
        ...

    def run(self, columns: int) -> int:
        """Return how many consecutive elements share one, from each multiple on; 0 means all."""
        ...

    def period(self, columns: int) -> int:
        """Return a number of elements at whose multiples a weight, and its operands, can be cut."""
        ...

    def decode(self, o: Ops[I, V], i: I) -> V:
        """Find the scale or zero point of element `i`."""
        ...


def _stored(name: str, entries: int, codec: Codec) -> tuple[Operand, ...]:
    """Describe an operand of so many entries, and the table that they are looked up in."""
    return (Operand(name, entries, codec.dtypes), *codec.operands())


@dataclass(frozen=True)
class BlockScale(Scale):
    """Every `block` consecutive elements have one scale; blocks run on from row to row."""

    operand: str
    block: int
    codec: Codec = FLOAT

    @property
    def blockwise(self) -> Blockwise:
        return Blockwise(self.block, (self.operand,), self.codec)

    def operands(self, rows: int, columns: int) -> tuple[Operand, ...]:
        blocks = -(-(rows * columns) // self.block)
        return _stored(self.operand, blocks, self.codec)

    def run(self, columns: int) -> int:
        return self.block

    def period(self, columns: int) -> int:
        return self.block

    def decode(self, o: Ops[I, V], i: I) -> V:
        return self.codec.decode(o, o.load(self.operand, o.idiv(i, self.block)))


@dataclass(frozen=True)
class GroupScale(Scale):
    """Every `group` columns of a row have one scale; the last group of a row may be shorter.

    layout: says where things lie in the matrix that has the weight's rows and a column per group.
    """

    operand: str
    group: int
    codec: Codec = FLOAT
    layout: Grid = ROW_MAJOR

    @property
    def grouped(self) -> Blockwise | None:
        if self.layout != ROW_MAJOR or not isinstance(self.codec, Number) or self.codec.factor != 1:
            return None
        return Blockwise(self.group, (self.operand,), self.codec)

    def operands(self, rows: int, columns: int) -> tuple[Operand, ...]:
        numel = self.layout.numel(rows, -(-columns // self.group))
        return _stored(self.operand, numel, self.codec)

    def run(self, columns: int) -> int:
        return math.gcd(self.group, columns)

    def period(self, columns: int) -> int:
        return self.layout.rows * columns

    def decode(self, o: Ops[I, V], i: I) -> V:
        groups = o.idiv(o.iadd(o.columns(), self.group - 1), self.group)
        group = o.idiv(o.column(i), self.group)
        place = self.layout.place(o, o.row(i), group, groups)
        return self.codec.decode(o, o.load(self.operand, place))


@dataclass(frozen=True)
class RowScale(Scale):
    """Every row has one scale."""

    operand: str
    codec: Codec = FLOAT

    def operands(self, rows: int, columns: int) -> tuple[Operand, ...]:
        return _stored(self.operand, rows, self.codec)

    def run(self, columns: int) -> int:
        return columns

    def period(self, columns: int) -> int:
        return columns

    def decode(self, o: Ops[I, V], i: I) -> V:
        return self.codec.decode(o, o.load(self.operand, o.row(i)))


@dataclass(frozen=True)
class TileScale(Scale):
    """Every tile of `height` rows and `width` columns has one scale; those at the ends are cut.

    The tiles of a stack of weights run on from one to the next, so each one's rows fill whole tiles
    where it is cut up.
    """

    operand: str
    height: int
    width: int
    codec: Codec = FLOAT

    def operands(self, rows: int, columns: int) -> tuple[Operand, ...]:
        tiles = -(-rows // self.height) * -(-columns // self.width)
        return _stored(self.operand, tiles, self.codec)

    def run(self, columns: int) -> int:
        return math.gcd(self.width, columns)

    def period(self, columns: int) -> int:
        return self.height * columns

    def decode(self, o: Ops[I, V], i: I) -> V:
        across = o.idiv(o.iadd(o.columns(), self.width - 1), self.width)
        first = o.imul(o.idiv(o.row(i), self.height), across)
        place = o.iadd(first, o.idiv(o.column(i), self.width))
        return self.codec.decode(o, o.load(self.operand, place))


@dataclass(frozen=True)
class TensorScale(Scale):
    """A weight has one scale, and so has a stack of weights."""

    operand: str
    codec: Codec = FLOAT

    def operands(self, rows: int, columns: int) -> tuple[Operand, ...]:
        return _stored(self.operand, 1, self.codec)

    def run(self, columns: int) -> int:
        return 0

    def period(self, columns: int) -> int:
        return 1

    def decode(self, o: Ops[I, V], i: I) -> V:
        return self.codec.decode(o, o.load(self.operand, o.zero(i)))


@dataclass(frozen=True)
class ProductScale(Scale):
    """Two scales are multiplied, and the product is rounded before it scales an element."""

    first: Scale
    second: Scale

    def operands(self, rows: int, columns: int) -> tuple[Operand, ...]:
        return (*self.first.operands(rows, columns), *self.second.operands(rows, columns))

    def run(self, columns: int) -> int:
        return math.gcd(self.first.run(columns), self.second.run(columns))

    def period(self, columns: int) -> int:
        return math.lcm(self.first.period(columns), self.second.period(columns))

    def decode(self, o: Ops[I, V], i: I) -> V:
        return o.mul(self.first.decode(o, i), self.second.decode(o, i))


@dataclass(frozen=True)
class QuotientScale(ProductScale):
    """The first scale is divided by the second, and the quotient rounded."""

    def decode(self, o: Ops[I, V], i: I) -> V:
        return o.div(self.first.decode(o, i), self.second.decode(o, i))


@dataclass(frozen=True)
class NestedScale(Scale):
    """The scale is quantized itself: it is `codec(scale code) * outer`, `+ offset` if it has one.

    This is QLoRA's double quantization, https://arxiv.org/abs/2305.14314, section 3."""

    operand: str
    block: int
    codec: Codec
    outer: BlockScale
    offset: str | None = None

    @property
    def blockwise(self) -> Blockwise | None:
        if self.codec.table is None or self.offset is None:
            return None
        names = (self.operand, self.codec.table.name, self.outer.operand, self.offset)
        return Blockwise(self.block, names, self.codec, self.outer.block)

    @property
    def plain(self) -> BlockScale:
        return BlockScale(self.operand, self.block)

    def operands(self, rows: int, columns: int) -> tuple[Operand, ...]:
        blocks = -(-(rows * columns) // self.block)
        offset = () if self.offset is None else (Operand(self.offset, 1, FLOATS),)
        return (
            *_stored(self.operand, blocks, self.codec),
            *self.outer.operands(1, blocks),
            *offset,
        )

    def run(self, columns: int) -> int:
        return self.block

    def period(self, columns: int) -> int:
        return self.block * self.outer.block

    def decode(self, o: Ops[I, V], i: I) -> V:
        b = o.idiv(i, self.block)
        value = self.codec.decode(o, o.load(self.operand, b))
        scale = o.mul(value, self.outer.decode(o, b))
        return scale if self.offset is None else o.add(scale, o.load(self.offset, o.zero(b)))


@dataclass(frozen=True)
class CenteredScale(Scale):
    """The scale is an 8-bit integer over a factor, `code / factor + mean`, all in bfloat16.

    `outer` blocks share a factor; the mean is that of all scales. This is torchao's double
    quantization: each step is rounded to bfloat16, in which the factors and the mean are stored.
    """

    operand: str
    block: int
    factor: BlockScale
    mean: str

    def operands(self, rows: int, columns: int) -> tuple[Operand, ...]:
        blocks = -(-(rows * columns) // self.block)
        codes, mean = Operand(self.operand, blocks, ("int8",)), Operand(self.mean, 1, ("bfloat16",))
        return (codes, *self.factor.operands(1, blocks), mean)

    def run(self, columns: int) -> int:
        return self.block

    def period(self, columns: int) -> int:
        return self.block * self.factor.block

    def decode(self, o: Ops[I, V], i: I) -> V:
        b = o.idiv(i, self.block)
        code = o.to_float(o.load(self.operand, b))
        quotient = rounded(o, o.div(code, self.factor.decode(o, b)), "bfloat16")
        mean = o.to_float(o.load(self.mean, o.zero(b)))
        return rounded(o, o.add(quotient, mean), "bfloat16")
