"""Print Triton device code: straight-line source for what a kernel computes of a format.

The printed functions are pure tile code: indices in, values out. `decode_fn(i, ...)` decodes the
elements of a tile of indices. A kernel that unpacks codes itself, whole words at a time, calls its
two parts: `scale_fn(i, ...)` finds what a tile of elements shares, `value_fn(code, ...)` decodes a
tile of codes. None of them looks at a format's name. Indices are unsigned inside of them: a signed
division by a power of two is a shift and three more instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inductor_q.decode.infix import Infix
from inductor_q.formats import QuantFormat


class Printer(Infix):
    """Prints a decode for Triton.

    mask: the name of the mask of every load of an operand, or None.
    """

    def __init__(self, mask: str | None) -> None:
        super().__init__()
        self.operands: dict[str, None] = {}
        self.tables: dict[tuple[float, ...], None] = {}
        self._sizes: set[str] = set()
        self._mask = mask

    def assign(self, name: str, expression: str) -> str:
        return f"{name} = {expression}"

    def _read(self, pointer: str, index: str) -> str:
        guard = f", mask={self._mask}, other=0" if self._mask else ""
        return self._let(f"tl.load({pointer} + {index}{guard})")

    def row(self, i: str) -> str:
        return self._let(f"{i} // {self.columns()}")

    def column(self, i: str) -> str:
        return self._let(f"{i} % {self.columns()}")

    def columns(self) -> str:
        return self._size("columns")

    def rows(self) -> str:
        return self._size("rows")

    def _size(self, name: str) -> str:
        self._sizes.add(name)
        return name

    @property
    def sizes(self) -> tuple[str, ...]:
        """The sizes of the weight that the lines use."""
        return tuple(sorted(self._sizes))

    def zero(self, like: str) -> str:
        return self._let(f"{like} * 0")

    def idiv(self, a: str, n: int) -> str:
        return self._let(f"{a} // {n}")

    def imod(self, a: str, n: int) -> str:
        return self._let(f"{a} % {n}")

    def isub(self, a: int, b: str) -> str:
        return self._let(f"{a} - {b}")

    def iadd(self, a: str, b: str | int) -> str:
        return self._let(f"{a} + {b}")

    def imul(self, a: str, b: str | int) -> str:
        return self._let(f"{a} * {b}")

    def load(self, name: str, i: str) -> str:
        self.operands.setdefault(name)
        return self._read(name, i)

    def gather(self, name: str, code: str, size: int) -> str:
        self.operands.setdefault(name)
        return self._read(name, f"{code}.to(tl.int32)")

    def codebook(self, values: tuple[float, ...], code: str) -> str:
        # The load hits the L1 cache: all lanes of a warp fall into one 64-byte line. A select tree
        # costs 15 instructions per element instead, which binds before memory does.
        self.tables.setdefault(values)
        assert len(self.tables) == 1, "printed code takes one codebook"
        return self._let(f"tl.load(codebook + {code})")

    def to_int(self, a: str) -> str:
        return self._let(f"{a}.to(tl.int32)")

    def bits(self, word: str, lane: str, bits: int) -> str:
        word = self.to_int(word)
        return self._let(f"({word} >> ({lane} * {bits}).to(tl.int32)) & {(1 << bits) - 1}")

    def sign_extend(self, code: str, bits: int) -> str:
        less = self.less(code, 1 << bits - 1)
        return self.where(less, code, self.add_int(code, -(1 << bits)))

    def where(self, condition: str, a: str, b: str) -> str:
        return self._let(f"tl.where({condition}, {a}, {b})")

    def to_float(self, a: str) -> str:
        return self._let(f"{a}.to(tl.float32)")

    def as_float(self, a: str) -> str:
        return self._let(f"{a}.to(tl.float32, bitcast=True)")

    def as_int(self, a: str) -> str:
        return self._let(f"{a}.to(tl.int32, bitcast=True)")

    def times(self, a: str, factor: float) -> str:
        return self._let(f"{a} * {factor!r}")

    def div(self, a: str, b: str) -> str:
        return self._let(f"tl.div_rn({a}, {b})")


@dataclass(frozen=True)
class DeviceFunctions:
    """Printed device code of a format and what it needs to be called.

    `scale_operands` are pointer arguments of `scale_fn`, which `sizes` of the weight follow. It
    returns as many values as `shared` names, which `value_fn` takes behind a code. `value_fn` reads
    a table through its last argument: the values `codebook`, or the operand that `table` names
    (both empty: none). `words_fn`, which a format with `places` has, takes `word_sizes` last.
    """

    source: str
    scale_operands: tuple[str, ...]
    codebook: tuple[float, ...]
    table: str = ""
    shared: tuple[str, ...] = ("scale",)
    sizes: tuple[str, ...] = ()
    word_sizes: tuple[str, ...] = ()


def device_functions(fmt: QuantFormat) -> DeviceFunctions:
    """Print `scale_fn(i, mask, *scale_operands)` and `value_fn(code, *shared, table)`, and
    `words_fn(i, mask, qweight)` where a packing has words."""
    scale = Printer(mask="mask")
    found = [part.decode(scale, "i") for part in fmt.shared]
    shared = ("scale",) if len(found) == 1 else tuple(f"shared{n}" for n in range(len(found)))
    value = Printer(mask=None)
    result = fmt.codec.decode(value, "code", *shared)
    names = tuple(scale.operands)
    table = next(iter(value.operands), "")
    source = (
        _function("scale_fn", ("i", "mask", *names, *scale.sizes), _unsigned(scale), found)
        + "\n\n"
        + _function("value_fn", ("code", *shared, table or "codebook"), value.lines, [result])
    )
    codebook = next(iter(value.tables), ())
    words = Printer(mask="mask")
    if fmt.places:
        loaded = fmt.packing.words(words, "i")
        arguments = ("i", "mask", "qweight", *words.sizes)
        source += "\n\n" + _function("words_fn", arguments, _unsigned(words), loaded)
    return DeviceFunctions(source, names, codebook, table, shared, scale.sizes, words.sizes)


@dataclass(frozen=True)
class DecodeFunction:
    """Printed `decode_fn(i, mask, *operands)`: all of a decode, by element.

    Behind the operands it takes a pointer to the values `codebook`, where there are any, and then
    `sizes` of the weight.
    """

    source: str
    codebook: tuple[float, ...]
    sizes: tuple[str, ...]


def decode_function(fmt: QuantFormat) -> DecodeFunction:
    """Print the whole decode of `fmt`; `qweight` points to units of its packing."""
    printer = Printer(mask="mask")
    result = fmt.decode(printer, "i")
    arguments = ["i", "mask", *fmt.operands]
    arguments += ["codebook"] if printer.tables else []
    arguments += printer.sizes
    source = _function("decode_fn", arguments, _unsigned(printer), [result])
    return DecodeFunction(source, next(iter(printer.tables), ()), printer.sizes)


def _unsigned(printer: Printer) -> list[str]:
    """Return the lines behind those that make an index, and the weight's sizes, unsigned."""
    lines = ["i = i.to(tl.uint64 if i.dtype == tl.int64 else tl.uint32)"]
    lines += [f"{size} = tl.cast({size}, i.dtype)" for size in printer.sizes]
    return [*lines, *printer.lines]


def _function(name: str, args: Sequence[str], lines: list[str], results: Sequence[str]) -> str:
    body = "\n".join(f"    {line}" for line in [*lines, f"return {', '.join(results)}"])
    return f"@triton.jit\ndef {name}({', '.join(args)}):\n{body}\n"
