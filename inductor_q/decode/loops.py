"""Decode in Inductor's loop-level ops: the scheduler fuses them into the kernels of neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch._inductor.virtualized import ops
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

Loader = Callable[[Sequence[Any]], Any]


class Loops:
    """Runs a decode inside an `inner_fn`; an index is a sympy expression of the loop variables.

    Inductor compiles C++ with contraction off, but Triton makes one FMA of a product and a sum;
    on "cuda" products are therefore rounded by an instruction of their own, as eager rounds them.
    It is NVIDIA's: AMD's GPUs, which torch calls "cuda" too, keep the FMA.
    """

    def __init__(
        self,
        loaders: Mapping[str, Loader],
        device: str,
        columns: Any = None,
        rows: Any = None,
    ) -> None:
        self._loaders = loaders
        self._columns = columns
        self._rows = rows
        self._contracts = device == "cuda" and torch.version.hip is None

    def row(self, i: Any) -> Any:
        return FloorDiv(i, self.columns())

    def column(self, i: Any) -> Any:
        return ModularIndexing(i, 1, self.columns())

    def columns(self) -> Any:
        assert self._columns is not None, "a format that goes by rows, and no number of columns"
        return self._columns

    def rows(self) -> Any:
        assert self._rows is not None, "a format that goes by columns, and no number of rows"
        return self._rows

    def zero(self, like: Any) -> Any:
        return sympy.S.Zero

    def idiv(self, a: Any, n: int) -> Any:
        # In C++, torch 2.11 to 2.13 splits the loop over a variable that is divided, and drops what
        # does not fill a part. It does not see that this quotient is one.
        columns = self._columns
        is_whole = isinstance(columns, (int, sympy.Integer)) and columns % n == 0
        return FloorDiv(a, n) if is_whole else FloorDiv(2 * a + 1, 2 * n)

    def imod(self, a: Any, n: int) -> Any:
        return ModularIndexing(a, 1, n)

    def isub(self, a: int, b: Any) -> Any:
        return a - b

    def iadd(self, a: Any, b: Any) -> Any:
        return a + b

    def imul(self, a: Any, b: Any) -> Any:
        return a * b

    def load(self, name: str, i: Any) -> Any:
        return self._loaders[name]([i])

    def gather(self, name: str, code: Any, size: int) -> Any:
        index = ops.indirect_indexing(
            ops.to_dtype(code, torch.int32), size, check=False, wrap_neg=False
        )
        return self._loaders[name]([index])

    def codebook(self, values: tuple[float, ...], code: Any) -> Any:
        # A select tree tests each of the code's bits once. It accesses no memory, and needs so few
        # operations (59 for 16 values) that it stays under Inductor's limit for one inner function.
        bits = [1 << b for b in reversed(range((len(values) - 1).bit_length()))]
        zero = ops.constant(0, torch.int32)
        is_set = {
            b: ops.ne(ops.bitwise_and(code, ops.constant(b, torch.int32)), zero) for b in bits
        }

        def tree(low: int, level: int) -> Any:
            if level == len(bits):
                return self._number(values[low])
            bit = bits[level]
            return ops.where(is_set[bit], tree(low + bit, level + 1), tree(low, level + 1))

        return tree(0, 0)

    def _number(self, value: float) -> Any:
        """Emit a constant; Triton reads a literal -0.0 as 0.0, so its bits stand for that one."""
        if value == 0 and math.copysign(1.0, value) < 0:
            return self.as_float(ops.constant(-(1 << 31), torch.int32))
        return ops.constant(value, torch.float32)

    def to_int(self, a: Any) -> Any:
        return ops.to_dtype(a, torch.int32)

    def bits(self, word: Any, lane: Any, bits: int) -> Any:
        word = ops.to_dtype(word, torch.int32)
        shifted = ops.bitwise_right_shift(word, ops.index_expr(lane * bits, torch.int32))
        return ops.bitwise_and(shifted, ops.constant((1 << bits) - 1, torch.int32))

    def with_bit(self, code: Any, bit: Any, position: int) -> Any:
        shifted = ops.bitwise_left_shift(bit, ops.constant(position, torch.int32))
        return ops.bitwise_or(code, shifted)

    def sign_extend(self, code: Any, bits: int) -> Any:
        return ops.where(self.less(code, 1 << bits - 1), code, self.add_int(code, -(1 << bits)))

    def add_int(self, a: Any, n: int) -> Any:
        return ops.add(a, ops.constant(n, torch.int32))

    def and_int(self, a: Any, n: int) -> Any:
        return ops.bitwise_and(a, ops.constant(n, torch.int32))

    def or_int(self, a: Any, n: int) -> Any:
        return ops.bitwise_or(a, ops.constant(n, torch.int32))

    def shift_left(self, a: Any, n: int) -> Any:
        return ops.bitwise_left_shift(a, ops.constant(n, torch.int32))

    def shift_right(self, a: Any, n: int) -> Any:
        return ops.bitwise_right_shift(a, ops.constant(n, torch.int32))

    def less(self, a: Any, n: int) -> Any:
        return ops.lt(a, ops.constant(n, torch.int32))

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        return ops.where(condition, a, b)

    def to_float(self, a: Any) -> Any:
        return ops.to_dtype(a, torch.float32)

    def as_float(self, a: Any) -> Any:
        return ops.to_dtype_bitcast(a, torch.float32, torch.int32)

    def as_int(self, a: Any) -> Any:
        return ops.to_dtype_bitcast(a, torch.int32, torch.float32)

    def times(self, a: Any, factor: float) -> Any:
        return ops.mul(a, ops.constant(factor, torch.float32))

    def mul(self, a: Any, b: Any) -> Any:
        return self._rounded("mul", a, b) if self._contracts else ops.mul(a, b)

    def div(self, a: Any, b: Any) -> Any:
        return self._rounded("div", a, b) if self._contracts else ops.truediv(a, b)

    def _rounded(self, name: str, a: Any, b: Any) -> Any:
        """Emit an instruction that rounds by itself, to the nearest number."""
        return ops.inline_asm_elementwise(
            a, b, asm=f"{name}.rn.f32 $0, $1, $2;", constraints="=f,f,f", dtype=torch.float32
        )

    def add(self, a: Any, b: Any) -> Any:
        return ops.add(a, b)

    def sub(self, a: Any, b: Any) -> Any:
        return ops.sub(a, b)
