"""Eager torch: the reference that every other interpreter is checked against."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Eager:
    """Runs a decode on tensors; an index is an int64 tensor of element numbers.

    columns, rows: those of the weight; formats that do not depend on them need none.
    """

    def __init__(
        self,
        operands: Mapping[str, Tensor],
        columns: int | None = None,
        rows: int | None = None,
    ) -> None:
        self._operands = operands
        self._columns = columns
        self._rows = rows

    def row(self, i: Tensor) -> Tensor:
        return i // self._known_columns()

    def column(self, i: Tensor) -> Tensor:
        return i % self._known_columns()

    def columns(self) -> Tensor:
        return torch.tensor(self._known_columns())

    def rows(self) -> Tensor:
        assert self._rows is not None, "a format that goes by columns, and no number of rows"
        return torch.tensor(self._rows)

    def _known_columns(self) -> int:
        assert self._columns is not None, "a format that goes by rows, and no number of columns"
        return self._columns

    def zero(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like)

    def idiv(self, a: Tensor, n: int) -> Tensor:
        return a // n

    def imod(self, a: Tensor, n: int) -> Tensor:
        return a % n

    def isub(self, a: int, b: Tensor) -> Tensor:
        return a - b

    def iadd(self, a: Tensor, b: Tensor | int) -> Tensor:
        return a + b

    def imul(self, a: Tensor, b: Tensor | int) -> Tensor:
        return a * b

    def load(self, name: str, i: Tensor) -> Tensor:
        return self._operands[name].reshape(-1)[i]

    def gather(self, name: str, code: Tensor, size: int) -> Tensor:
        return self._operands[name].reshape(-1)[code.long()]

    def codebook(self, values: tuple[float, ...], code: Tensor) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=code.device)[code.long()]

    def to_int(self, a: Tensor) -> Tensor:
        return a.to(torch.int32)

    def bits(self, word: Tensor, lane: Tensor, bits: int) -> Tensor:
        return (word.to(torch.int32) >> (lane * bits).to(torch.int32)) & ((1 << bits) - 1)

    def with_bit(self, code: Tensor, bit: Tensor, position: int) -> Tensor:
        return code | (bit << position)

    def sign_extend(self, code: Tensor, bits: int) -> Tensor:
        return torch.where(code < 1 << bits - 1, code, code - (1 << bits))

    def add_int(self, a: Tensor, n: int) -> Tensor:
        return a + n

    def and_int(self, a: Tensor, n: int) -> Tensor:
        return a & n

    def or_int(self, a: Tensor, n: int) -> Tensor:
        return a | n

    def shift_left(self, a: Tensor, n: int) -> Tensor:
        return a << n

    def shift_right(self, a: Tensor, n: int) -> Tensor:
        return a >> n

    def less(self, a: Tensor, n: int) -> Tensor:
        return a < n

    def where(self, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.where(condition, a, b)

    def to_float(self, a: Tensor) -> Tensor:
        return a.to(torch.float32)

    def as_float(self, a: Tensor) -> Tensor:
        return a.view(torch.float32)

    def as_int(self, a: Tensor) -> Tensor:
        return a.view(torch.int32)

    def times(self, a: Tensor, factor: float) -> Tensor:
        return a * factor

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def sub(self, a: Tensor, b: Tensor) -> Tensor:
        return a - b

    def div(self, a: Tensor, b: Tensor) -> Tensor:
        return a / b
