"""Where the code of element `i` lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Packing:
    """`8 // bits` codes in each byte of the operand `qweight`."""

    bits: int
    high_first: bool

    @property
    def per_byte(self) -> int:
        return 8 // self.bits

    def shift(self, lane: int) -> int:
        """The right shift that brings the code of a byte's `lane`-th element down."""
        return self.bits * (self.per_byte - 1 - lane if self.high_first else lane)

    def code(self, o: Any, i: Any) -> Any:
        byte = o.load("qweight", o.idiv(i, self.per_byte))
        lane = o.imod(i, self.per_byte)
        if self.high_first:
            lane = o.isub(self.per_byte - 1, lane)
        return o.bits(byte, lane, self.bits)
