"""What a code means: a code, and what its element shares with neighbours, to a float32 value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from inductor_q.formats.operand import FLOATS, Operand
from inductor_q.formats.ops import I, Ops, V


class Codec(Protocol):
    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes in which a code may be stored that has an element of an operand to itself."""
        ...

    @property
    def values(self) -> tuple[float, ...] | None:
        """The value of each code before it is scaled, where that is all there is to the codec."""
        ...

    @property
    def table(self) -> Operand | None:
        """The operand that holds the value of each code, likewise."""
        ...

    def operands(self) -> tuple[Operand, ...]: ...

    def decode(self, o: Ops[I, V], code: V, *shared: V) -> V:
        """The value of `code`; `shared` are those of `QuantFormat.shared`, in their order."""
        ...


def scaled(o: Ops[I, V], value: V, scales: tuple[V, ...]) -> V:
    for scale in scales:
        value = o.mul(value, scale)
    return value


@dataclass(frozen=True)
class Codebook:
    """A fixed table of values, known when the format is."""

    values: tuple[float, ...]
    dtypes = ("uint8",)
    table = None

    def operands(self) -> tuple[Operand, ...]:
        return ()

    def decode(self, o: Ops[I, V], code: V, *shared: V) -> V:
        return scaled(o, o.codebook(self.values, code), shared)


@dataclass(frozen=True)
class Table:
    """A table that is itself an operand (bitsandbytes' 8-bit dynamic map)."""

    operand: str
    size: int
    dtypes = ("uint8",)
    values = None

    @property
    def table(self) -> Operand:
        return Operand(self.operand, self.size, FLOATS)

    def operands(self) -> tuple[Operand, ...]:
        return (self.table,)

    def decode(self, o: Ops[I, V], code: V, *shared: V) -> V:
        return scaled(o, o.gather(self.operand, code, self.size), shared)


@dataclass(frozen=True)
class Number:
    """A number that is stored as it is."""

    dtypes: tuple[str, ...] = FLOATS
    values = None
    table = None

    def operands(self) -> tuple[Operand, ...]:
        return ()

    def decode(self, o: Ops[I, V], code: V, *shared: V) -> V:
        return scaled(o, o.to_float(code), shared)


@dataclass(frozen=True)
class Affine:
    """An unsigned integer: `(code - zero_point) * scale`, the scale being shared first."""

    dtypes = ("uint8",)
    values = None
    table = None

    def operands(self) -> tuple[Operand, ...]:
        return ()

    def decode(self, o: Ops[I, V], code: V, *shared: V) -> V:
        scale, zero_point = shared
        return o.mul(o.sub(o.to_float(code), zero_point), scale)
