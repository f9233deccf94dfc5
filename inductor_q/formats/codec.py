"""What a code means: code -> real value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


class Codec(Protocol):
    def decode(self, o: Any, code: Any) -> Any: ...


@dataclass(frozen=True)
class Codebook:
    """A fixed table of values, known when the format is."""

    values: tuple[float, ...]

    def decode(self, o: Any, code: Any) -> Any:
        return o.codebook(self.values, code)


@dataclass(frozen=True)
class Table:
    """A table that is itself an operand (bitsandbytes' 8-bit dynamic map)."""

    operand: str
    size: int

    def decode(self, o: Any, code: Any) -> Any:
        return o.gather(self.operand, code, self.size)
