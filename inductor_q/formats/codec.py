"""What a code means: code -> real value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from inductor_q.formats.operand import FLOATS, Operand


class Codec(Protocol):
    def operands(self) -> tuple[Operand, ...]: ...

    def decode(self, o: Any, code: Any) -> Any: ...


@dataclass(frozen=True)
class Codebook:
    """A fixed table of values, known when the format is."""

    values: tuple[float, ...]

    def operands(self) -> tuple[Operand, ...]:
        return ()

    def decode(self, o: Any, code: Any) -> Any:
        return o.codebook(self.values, code)


@dataclass(frozen=True)
class Table:
    """A table that is itself an operand (bitsandbytes' 8-bit dynamic map)."""

    operand: str
    size: int

    def operands(self) -> tuple[Operand, ...]:
        return (Operand(self.operand, self.size, FLOATS),)

    def decode(self, o: Any, code: Any) -> Any:
        return o.gather(self.operand, code, self.size)
