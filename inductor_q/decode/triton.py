"""A printer of Triton device code: straight-line source for one scale and one value.

The printed functions are pure tile code: indices in, values out. `value_<name>(code, scale, ...)`
decodes a tile of codes, `scale_<name>(i, ...)` finds the scales of a tile of flat indices. Kernels
call them and never look at a format's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inductor_q.formats import QuantFormat


class Printer:
    """Interprets a decode by writing one assignment per operation."""

    def __init__(self, mask: str | None) -> None:
        self.lines: list[str] = []
        self.operands: dict[str, None] = {}
        self._mask = mask

    def _let(self, expression: str) -> str:
        name = f"t{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        return name

    def _read(self, pointer: str, index: str) -> str:
        guard = f", mask={self._mask}, other=0" if self._mask else ""
        return self._let(f"tl.load({pointer} + {index}{guard})")

    def load(self, name: str, i: str) -> str:
        self.operands.setdefault(name)
        return self._read(name, i)

    def gather(self, name: str, code: str, size: int) -> str:
        self.operands.setdefault(name)
        return self._read(name, f"{code}.to(tl.int32)")

    def codebook(self, values: tuple[float, ...], code: str) -> str:
        # From the L1 cache: all lanes of a warp fall into one 64-byte line. A select tree costs 15
        # instructions an element instead, which binds before memory does.
        return self._let(f"tl.load(codebook + {code})")

    def idiv(self, a: str, n: int) -> str:
        return self._let(f"{a} // {n}")

    def zero(self, like: str) -> str:
        return self._let(f"{like} * 0")

    def minifloat(self, code: str, mantissa_bits: int, bias: int) -> str:
        code = self._let(f"{code}.to(tl.int32)")
        rebias = (127 - bias) << mantissa_bits
        normal = self._let(f"({code} + {rebias}) << {23 - mantissa_bits}")
        unit = 2.0 ** (1 - bias - mantissa_bits)
        subnormal = self._let(f"{code}.to(tl.float32) * {unit!r}")
        return self._let(
            f"tl.where({code} < {1 << mantissa_bits}, {subnormal}, "
            f"{normal}.to(tl.float32, bitcast=True))"
        )

    def to_float(self, a: str) -> str:
        return self._let(f"{a}.to(tl.float32)")

    def mul(self, a: str, b: str) -> str:
        return self._let(f"{a} * {b}")

    def add(self, a: str, b: str) -> str:
        return self._let(f"{a} + {b}")


@dataclass(frozen=True)
class DeviceFunctions:
    """Printed device code of a format and what it needs to be called.

    `scale_operands` are pointer arguments of `scale_fn`. `value_fn` reads a table through its last
    argument: the values `codebook`, or the operand that `table` names (both empty: none).
    """

    source: str
    scale_operands: tuple[str, ...]
    codebook: tuple[float, ...]
    table: str = ""


def device_functions(fmt: QuantFormat) -> DeviceFunctions:
    """Print `scale_fn(i, mask, *scale_operands)` and `value_fn(code, scale, table)`."""
    scale = Printer(mask="mask")
    scale_result = fmt.scale.decode(scale, "i")
    value = Printer(mask=None)
    value_result = fmt.decode_code(value, "code", "scale")
    names = tuple(scale.operands)
    table = next(iter(value.operands), "")
    source = (
        _function("scale_fn", ("i", "mask", *names), scale.lines, scale_result)
        + "\n\n"
        + _function("value_fn", ("code", "scale", table or "codebook"), value.lines, value_result)
    )
    return DeviceFunctions(source, names, getattr(fmt.codec, "values", ()), table)


def _function(name: str, args: tuple[str, ...], lines: list[str], result: Any) -> str:
    body = "\n".join(f"    {line}" for line in [*lines, f"return {result}"])
    return f"@triton.jit\ndef {name}({', '.join(args)}):\n{body}\n"
