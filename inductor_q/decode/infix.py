"""What printers of a decode share whose languages spell operators as C does."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Infix(ABC):
    """Interprets a decode by writing one assignment per operation."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @abstractmethod
    def assign(self, name: str, expression: str) -> str:
        """Return the line that gives the value of `expression` a name."""

    def _let(self, expression: str) -> str:
        name = f"t{len(self.lines)}"
        self.lines.append(self.assign(name, expression))
        return name

    def with_bit(self, code: str, bit: str, position: int) -> str:
        return self._let(f"{code} | ({bit} << {position})")

    def add_int(self, a: str, n: int) -> str:
        return self._let(f"{a} + {n}")

    def and_int(self, a: str, n: int) -> str:
        return self._let(f"{a} & {n}")

    def or_int(self, a: str, n: int) -> str:
        return self._let(f"{a} | {n}")

    def shift_left(self, a: str, n: int) -> str:
        return self._let(f"{a} << {n}")

    def shift_right(self, a: str, n: int) -> str:
        return self._let(f"{a} >> {n}")

    def less(self, a: str, n: int) -> str:
        return self._let(f"{a} < {n}")

    def mul(self, a: str, b: str) -> str:
        return self._let(f"{a} * {b}")

    def add(self, a: str, b: str) -> str:
        return self._let(f"{a} + {b}")

    def sub(self, a: str, b: str) -> str:
        return self._let(f"{a} - {b}")
