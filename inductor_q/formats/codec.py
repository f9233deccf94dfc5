"""Codecs: what a code means, given what its element shares with neighbours, as a float32 value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from inductor_q.formats.operand import FLOATS, Operand
from inductor_q.formats.ops import I, Ops, V


@dataclass(frozen=True)
class Line:
    """Values of 16 codes on a line: `(number - zero_point) * scale`, or `number * scale +
    zero_point` where the zero point is a value."""

    numbers: tuple[float, ...]
    zero_is_value: bool


class Codec(Protocol):
    @property
    def dtypes(self) -> tuple[str, ...]:
        """List the dtypes of an operand that holds one code per element."""
        ...

    @property
    def values(self) -> tuple[float, ...] | None:
        """Return the unscaled value of each code, where the codec is a fixed table; else None."""
        ...

    @property
    def table(self) -> Operand | None:
        """Return the operand that holds the unscaled values, where it is one; else None."""
        ...

    @property
    def line(self) -> Line | None:
        """Describe the values of 4-bit codes, where they lie on a line; else None."""
        ...

    def operands(self) -> tuple[Operand, ...]: ...

    def decode(self, o: Ops[I, V], code: V, *shared: V) -> V:
        """Decode `code` under `shared`, which are those of `QuantFormat.shared`, in their order."""
        ...


def scaled(o: Ops[I, V], value: V, scales: tuple[V, ...]) -> V:
    """Multiply `value` by each of `scales` in turn."""
    for scale in scales:
        value = o.mul(value, scale)
    return value


@dataclass(frozen=True)
class Codebook:
    """The values are a fixed table, known when the format is."""

    values: tuple[float, ...]
    dtypes = ("uint8",)
    table = None
    line = None

    def operands(self) -> tuple[Operand, ...]:
        return ()

    def decode(self, o: Ops[I, V], code: V, *shared: V) -> V:
        return scaled(o, o.codebook(self.values, code), shared)


@dataclass(frozen=True)
class Table:
    """The values are an operand (bitsandbytes' 8-bit dynamic map)."""

    operand: str
    size: int
    dtypes = ("uint8",)
    values = None
    line = None

    @property
    def table(self) -> Operand:
        return Operand(self.operand, self.size, FLOATS)

    def operands(self) -> tuple[Operand, ...]:
        return (self.table,)

    def decode(self, o: Ops[I, V], code: V, *shared: V) -> V:
        return scaled(o, o.gather(self.operand, code, self.size), shared)


@dataclass(frozen=True)
class Number:
    """The number is stored as it is, or divided by `factor`."""

    dtypes: tuple[str, ...] = FLOATS
    factor: float = 1.0
    values = None
    table = None
    line = None

    def operands(self) -> tuple[Operand, ...]:
        return ()

    def decode(self, o: Ops[I, V], code: V, *shared: V) -> V:
        value = o.to_float(code)
        return scaled(o, value if self.factor == 1 else o.times(value, self.factor), shared)


#: How many bits of a float32 number's mantissa a 16-bit dtype does without.
_DROPPED = {"bfloat16": 16, "float16": 13}


def rounded(o: Ops[I, V], a: V, dtype: str) -> V:
    """Round a float32 number to the nearest of a 16-bit dtype, and to the even one of two.

    float16 has fewer exponents, so there the number has to lie in its range, and one that is below
    its smallest normal number has to be one of its numbers already.
    """
    dropped = _DROPPED[dtype]
    bits = o.as_int(a)
    odd = o.and_int(o.shift_right(bits, dropped), 1)
    near = o.and_int(o.add_int(o.add(bits, odd), (1 << dropped - 1) - 1), -1 << dropped)
    is_finite = o.less(o.and_int(bits, 0x7FFFFFFF), 0x7F800000)
    return o.as_float(o.where(is_finite, near, bits))  # a GPU's NaN has all bits set


@dataclass(frozen=True)
class Integer:
    """The value is a signed integer of 8 bits."""

    dtypes = ("uint8",)
    values = None
    table = None
    line = None

    def operands(self) -> tuple[Operand, ...]:
        return ()

    def decode(self, o: Ops[I, V], code: V, *shared: V) -> V:
        return scaled(o, o.to_float(o.sign_extend(code, 8)), shared)


@dataclass(frozen=True)
class Affine:
    """The value is `(code - zero_point) * scale`; the scale comes first in `shared`.

    signed_bits: is how many bits a code has that is signed; 0 where codes are not.
    """

    signed_bits: int = 0
    dtypes = ("uint8",)
    values = None
    table = None

    @property
    def line(self) -> Line | None:
        return None if self.signed_bits else Line(tuple(map(float, range(16))), False)

    def operands(self) -> tuple[Operand, ...]:
        return ()

    def decode(self, o: Ops[I, V], code: V, *shared: V) -> V:
        scale, zero_point = shared
        code = o.sign_extend(code, self.signed_bits) if self.signed_bits else code
        return o.mul(o.sub(o.to_float(code), zero_point), scale)


@dataclass(frozen=True)
class RoundedAffine:
    """The value is `(code - zero_point) * scale`, its difference rounded to `dtype` as HQQ does.

    The scale comes first in `shared`; it and the zero point have that dtype, and the zero point is
    no integer.
    """

    dtype: str
    dtypes = ("uint8",)
    values = None
    table = None
    line = None

    def operands(self) -> tuple[Operand, ...]:
        return ()

    def decode(self, o: Ops[I, V], code: V, *shared: V) -> V:
        scale, zero_point = shared
        return o.mul(rounded(o, o.sub(o.to_float(code), zero_point), self.dtype), scale)


@dataclass(frozen=True)
class Shifted:
    """The value is `number * scale + zero_point`, with the zero point among the values.

    A number is from -8 to 7: its code is in two's complement, or is 8 more where `is_offset`.
    """

    is_offset: bool
    dtypes = ("uint8",)
    values = None
    table = None

    @property
    def line(self) -> Line:
        signed = range(-8, 8) if self.is_offset else (*range(8), *range(-8, 0))
        return Line(tuple(map(float, signed)), True)

    def operands(self) -> tuple[Operand, ...]:
        return ()

    def decode(self, o: Ops[I, V], code: V, *shared: V) -> V:
        scale, zero_point = shared
        number = o.add_int(code, -8) if self.is_offset else o.sign_extend(code, 4)
        return o.add(o.mul(o.to_float(number), scale), zero_point)
