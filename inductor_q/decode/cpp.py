"""Print C++ of a format: where a code lies, what neighbours share, and a vector of values.

The source is what `csrc/dequantize.cpp` includes. Nothing in it knows the dtype of the output, and
operands of floating-point numbers may have any of theirs. Values are computed in the compiler's own
vectors, so nothing depends on which loops it can turn into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inductor_q.decode.infix import Infix
from inductor_q.formats import QuantFormat
from inductor_q.formats.operand import FLOATS


@dataclass(frozen=True)
class Place:
    """The index `factor * base + lane`, whose lane is from 0 to `factor - 1`.

    Dividing it by what divides the factor takes no division: of neighbours whose codes are unpacked
    together, each lane is a constant.
    """

    factor: int
    base: str
    lane: str

    def __str__(self) -> str:
        return f"({self.factor} * {self.base} + {self.lane})"


Index = Place | str | int


class Printer(Infix):
    """Prints a decode for C++, of numbers or of vectors of them.

    column: the column of the element.
    """

    def __init__(self, fmt: QuantFormat, column: Index) -> None:
        super().__init__()
        self.tables: list[str] = []
        self._fmt = fmt
        self._column = column

    def assign(self, name: str, expression: str) -> str:
        return f"const auto {name} = {expression};"

    def row(self, i: Index) -> Index:
        return "row"

    def column(self, i: Index) -> Index:
        return self._column

    def columns(self) -> Index:
        return "weight.columns"

    def rows(self) -> Index:
        return "weight.rows"

    def zero(self, like: Index) -> Index:
        return 0

    def idiv(self, a: Index, n: int) -> Index:
        if not isinstance(a, Place) or a.factor % n:
            return f"({a} / {n})"
        return a.base if a.factor == n else Place(a.factor // n, a.base, f"({a.lane} / {n})")

    def imod(self, a: Index, n: int) -> Index:
        if not isinstance(a, Place) or a.factor % n:
            return f"({a} % {n})"
        return a.lane if a.factor == n else f"({a.lane} % {n})"

    def isub(self, a: int, b: Index) -> Index:
        return f"({a} - {b})"

    def iadd(self, a: Index, b: Index) -> Index:
        return f"({a} + {b})"

    def imul(self, a: Index, b: Index) -> Index:
        return f"({a} * {b})"

    def load(self, name: str, i: Index) -> str:
        if name == "qweight":
            return self._let(f"qweight[{i}]")
        n = self._fmt.operands.index(name)
        dtypes = self._fmt.requirements((1, 1))[n].dtypes
        if set(dtypes) <= set(FLOATS):
            return self._let(f"widen(weight.operands[{n}], {i}, weight.dtypes[{n}])")
        return self._let(f"static_cast<const {dtypes[0]}_t*>(weight.operands[{n}])[{i}]")

    def gather(self, name: str, code: str, size: int) -> str:
        table = self._fmt.codec.table
        if table is None or name != table.name:  # one number, of a scale
            return self.load(name, code)
        return self._let(f"look_up<{size}>(weight.table, {code})")

    def codebook(self, values: tuple[float, ...], code: str) -> str:
        name = f"kTable{len(self.tables)}"
        numbers = ", ".join(f"{value.hex()}f" for value in values)
        self.tables.append(f"constexpr float {name}[{max(16, len(values))}] = {{{numbers}}};")
        return self._let(f"look_up<{len(values)}>({name}, {code})")

    def to_int(self, a: str) -> str:
        return self._let(f"to_int({a})")

    def bits(self, word: str, lane: Index, bits: int) -> str:
        return self._let(f"(to_int({word}) >> ({lane} * {bits})) & {(1 << bits) - 1}")

    def sign_extend(self, code: str, bits: int) -> str:
        return self._let(f"sign_extend<{bits}>({code})")

    def where(self, condition: str, a: str, b: str) -> str:
        return self._let(f"{condition} ? {a} : {b}")

    def to_float(self, a: str) -> str:
        return self._let(f"to_float({a})")

    def as_float(self, a: str) -> str:
        return self._let(f"as_float({a})")

    def as_int(self, a: str) -> str:
        return self._let(f"as_int({a})")

    def times(self, a: str, factor: float) -> str:
        return self._let(f"{a} * {factor.hex()}f")

    def div(self, a: str, b: str) -> str:
        return self._let(f"{a} / {b}")


_CODE = "int32_t code_of(const Unit* qweight, const Weight& weight, int64_t row, {})"
_INDEX = "int64_t base, int32_t lane, int64_t column_base, int32_t column_lane"
_SHARE = "void share(const Weight& weight, int64_t i, int64_t row, int64_t column, float* shared)"
_VALUE = "Floats value_of(const Weight& weight, Codes code, const Floats* shared)"


def source(fmt: QuantFormat) -> str:
    """Print the functions of `fmt` and the constants that go with them.

    `code_of` finds the code of element kTogether * base + lane, whose column is made up likewise;
    `share` what element i shares with its neighbours.
    """
    together = len(fmt.places) or fmt.packing.period(1)
    code = Printer(fmt, Place(together, "column_base", "column_lane"))
    found = fmt.packing.code(code, Place(together, "base", "lane"))
    shared, value = Printer(fmt, "column"), Printer(fmt, "column")
    scales = [scale.decode(shared, "i") for scale in fmt.shared]
    result = fmt.codec.decode(value, "code", *(f"shared[{n}]" for n in range(len(scales))))
    table = fmt.codec.table
    lines = [
        f"using Unit = {fmt.packing.unit}_t;",
        f"constexpr int kTogether = {together}, kShared = {len(scales)};",
        f"constexpr int kTable = {table.numel if table else 0};",
        f"constexpr int kTableOperand = {fmt.operands.index(table.name) if table else 0};",
        *(*shared.tables, *value.tables),
        *_function(_CODE.format(_INDEX), [*code.lines, f"return {found};"]),
        *_function(_SHARE, [*shared.lines, *(f"shared[{n}] = {s};" for n, s in enumerate(scales))]),
        *_function(_VALUE, [*value.lines, f"return {result};"]),
    ]
    return "\n".join([*lines, ""])


def _function(head: str, lines: Sequence[str]) -> list[str]:
    return [f"inline {head} {{", *(f"  {line}" for line in lines), "}"]
