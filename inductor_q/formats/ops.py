"""The operations in which a decode is written: the contract between formats and interpreters."""

from __future__ import annotations

from typing import Protocol, TypeVar

I = TypeVar("I")  # noqa: E741
V = TypeVar("V")


class Ops(Protocol[I, V]):
    """An interpreter of `QuantFormat.decode`.

    An index `I` is the number of an element, counted through the rows of the weight, or the place
    of something stored. A value `V` is what is stored there, an integer (int32 unless an operation
    says otherwise), a float32 number or a truth value. An interpreter is made for one weight, whose
    rows and columns it knows.
    """

    # --- indices ---

    def row(self, i: I) -> I:
        """Return the row of element `i`."""
        ...

    def column(self, i: I) -> I:
        """Return the column of element `i`."""
        ...

    def columns(self) -> I:
        """Return how many columns the weight has."""
        ...

    def rows(self) -> I:
        """Return how many rows the weight has."""
        ...

    def zero(self, like: I) -> I: ...

    def idiv(self, a: I, n: int) -> I: ...

    def imod(self, a: I, n: int) -> I: ...

    def isub(self, a: int, b: I) -> I: ...

    def iadd(self, a: I, b: I | int) -> I: ...

    def imul(self, a: I, b: I | int) -> I: ...

    # --- what is stored ---

    def load(self, name: str, i: I) -> V:
        """Load element `i` of an operand, in its own dtype."""
        ...

    def gather(self, name: str, code: V, size: int) -> V:
        """Load element `code` of an operand of `size` elements."""
        ...

    def codebook(self, values: tuple[float, ...], code: V) -> V:
        """Return `values[code]` in float32."""
        ...

    # --- integers ---

    def to_int(self, a: V) -> V:
        """Convert an integer of any width to int32."""
        ...

    def bits(self, word: V, lane: I, bits: int) -> V:
        """Extract the `lane`-th group of `bits` bits of a word, counted from the lowest."""
        ...

    def with_bit(self, code: V, bit: V, position: int) -> V:
        """Put `bit` into `code` at `position`, where it has none."""
        ...

    def sign_extend(self, code: V, bits: int) -> V:
        """Read a code of so many bits as a number in two's complement."""
        ...

    def add_int(self, a: V, n: int) -> V: ...

    def and_int(self, a: V, n: int) -> V: ...

    def or_int(self, a: V, n: int) -> V: ...

    def shift_left(self, a: V, n: int) -> V: ...

    def shift_right(self, a: V, n: int) -> V: ...

    def less(self, a: V, n: int) -> V:
        """Whether the integer `a` is less than `n`: a condition for `where`."""
        ...

    def where(self, condition: V, a: V, b: V) -> V: ...

    # --- floats ---

    def to_float(self, a: V) -> V:
        """Convert a number of any dtype to float32."""
        ...

    def as_float(self, a: V) -> V:
        """Return the float32 number whose bits are the int32 `a`."""
        ...

    def as_int(self, a: V) -> V:
        """Return the int32 whose bits are those of the float32 `a`."""
        ...

    def times(self, a: V, factor: float) -> V:
        """Multiply `a` with a constant; no sum follows, unless it is a power of two or -1."""
        ...

    def mul(self, a: V, b: V) -> V:
        """Return the product, rounded by itself: never one FMA with a sum that follows."""
        ...

    def add(self, a: V, b: V) -> V: ...

    def sub(self, a: V, b: V) -> V: ...

    def div(self, a: V, b: V) -> V:
        """Return the quotient, rounded to the nearest number."""
        ...
