"""Floating-point numbers of at most 8 bits, decoded by integer arithmetic.

E4M3 and E5M2 are those of "FP8 Formats for Deep Learning", arXiv 2209.05433; E2M1 and E8M0 those of
the OCP Microscaling (MX) specification, version 1.0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from inductor_q.formats.codec import scaled
from inductor_q.formats.operand import Operand
from inductor_q.formats.ops import I, Ops, V

_INFINITY = 0x7F800000  # float32's exponent of infinity and NaN, all ones
_NAN = 0x7FC00000
_HALF_OF_SMALLEST_NORMAL = 0x00400000  # 2^-127, which float32 has as a subnormal number


@dataclass(frozen=True)
class Minifloat:
    """A code consists of a sign, an exponent e and a mantissa m, from the highest bit down.

    The value is 2^(e - bias) * (1 + m / 2^mantissa_bits), and for e = 0 it is the subnormal number
    2^(1 - bias) * m / 2^mantissa_bits.

    special: says which codes stand for no number: "none" of them; infinity and NaN, which "ieee"
        puts at the largest e; or "nan", which is the largest magnitude alone.
    subnormal: is False where e = 0 is an exponent as any other.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    signed: bool = True
    special: Literal["none", "ieee", "nan"] = "none"
    subnormal: bool = True
    dtypes = ("uint8",)
    values = None
    table = None
    line = None

    @property
    def magnitudes(self) -> int:
        """Return how many codes there are without the sign."""
        return 1 << self.exponent_bits + self.mantissa_bits

    @property
    def smallest_normal(self) -> float:
        return math.ldexp(1.0, (1 if self.subnormal else 0) - self.bias)

    @property
    def largest(self) -> float:
        """Return the largest finite number."""
        m = 1 << self.mantissa_bits
        code = {"none": self.magnitudes, "nan": self.magnitudes - 1, "ieee": self.magnitudes - m}
        e, mantissa = divmod(code[self.special] - 1, m)
        return math.ldexp(1 + mantissa / m, e - self.bias)

    def operands(self) -> tuple[Operand, ...]:
        return ()

    def decode(self, o: Ops[I, V], code: V, *shared: V) -> V:
        code = o.to_int(code)
        magnitude = o.and_int(code, self.magnitudes - 1) if self.signed else code
        bits = self._bits(o, magnitude)
        if self.signed:
            sign = o.shift_right(code, self.exponent_bits + self.mantissa_bits)
            bits = o.with_bit(bits, sign, 31)
        return scaled(o, o.as_float(bits), shared)

    def _bits(self, o: Ops[I, V], magnitude: V) -> V:
        """Put exponent and mantissa where float32 has them, and correct the exponent by the bias.

        Subnormal numbers are products. They are normal ones of float32, and no step towards them is
        subnormal, since a processor may be told to take those for zero.
        """
        m = self.mantissa_bits
        bits = o.shift_left(magnitude, 23 - m)
        if self.bias != 127:
            bits = o.add_int(bits, 127 - self.bias << 23)
        if self.special == "ieee":
            first = self.magnitudes - (1 << m)
            bits = o.where(o.less(magnitude, first), bits, o.or_int(bits, _INFINITY))
        if self.special == "nan":
            last = self.magnitudes - 1
            bits = o.where(o.less(magnitude, last), bits, o.or_int(bits, _NAN))
        if self.subnormal:
            low = o.as_int(o.times(o.to_float(magnitude), math.ldexp(1.0, 1 - self.bias - m)))
            bits = o.where(o.less(magnitude, 1 << m), low, bits)
        else:
            assert self.bias == 127, "2^-127 alone has an exponent that is none of float32's"
            low = o.or_int(bits, _HALF_OF_SMALLEST_NORMAL)
            bits = o.where(o.less(magnitude, 1), low, bits)
        return bits


E4M3 = Minifloat("e4m3", 4, 3, 7, special="nan")
E5M2 = Minifloat("e5m2", 5, 2, 15, special="ieee")
E2M1 = Minifloat("e2m1", 2, 1, 1)
E8M0 = Minifloat("e8m0", 8, 0, 127, signed=False, special="nan", subnormal=False)
E4M4 = Minifloat("e4m4", 4, 4, 11, signed=False)
