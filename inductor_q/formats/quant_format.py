"""One description per format; everything else interprets `QuantFormat.decode`.

`decode(o, i)` is written once against the operations `o` of `formats.ops` and run by the
interpreters in `inductor_q.decode`: eager torch (the reference and the fake), Inductor's loop-level
ops (the lowering), printers of Triton device code and of C++. Nothing here knows torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from inductor_q.exc import UnknownFormat
from inductor_q.formats.codec import Codec, Line
from inductor_q.formats.operand import Operand
from inductor_q.formats.ops import I, Ops, V
from inductor_q.formats.packing import Packing
from inductor_q.formats.sample import random_operand
from inductor_q.formats.scale import Blockwise, Scale

if TYPE_CHECKING:
    from torch import Generator, Tensor


@dataclass(frozen=True)
class QuantFormat:
    """A quantized weight: where codes lie, what they mean, and what neighbours share.

    packing: finds the code of an index.
    codec: makes a value of a code and of what is shared.
    shared: finds what an index shares: the scale and, where the codec takes one, the zero point.

    Frozen, hashable and comparable. Only `name` crosses an operator schema.
    """

    name: str
    packing: Packing
    codec: Codec
    shared: tuple[Scale, ...]

    def __hash__(self) -> int:
        return hash(self.name)  # a hash of all fields would take as long as a launch

    def decode(self, o: Ops[I, V], i: I) -> V:
        """Decode element `i` of the weight, counted through its rows, to float32."""
        code = self.packing.code(o, i)
        return self.codec.decode(o, code, *(scale.decode(o, i) for scale in self.shared))

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The operands' names in the order of their first use, which running `decode` finds."""
        return tuple(self._probe.seen)

    def requirements(self, shape: Sequence[int]) -> tuple[Operand, ...]:
        """Describe what each of `operands`, in their order, has to be for a weight of `shape`.

        The last dimension is that of columns; all others count rows, as in a stack of weights.
        """
        rows, columns = math.prod(shape[:-1]), shape[-1] if shape else 1
        parts = [*self.packing.operands(rows, columns), *self.codec.operands()]
        for scale in self.shared:
            parts += scale.operands(rows, columns)
        by_name = {operand.name: operand for operand in parts}
        return tuple(by_name[name] for name in self.operands)

    def sample(self, shape: Sequence[int], generator: Generator) -> list[Tensor]:
        """Make random operands of a weight of `shape`, in the order of `operands`."""
        return [random_operand(operand, generator) for operand in self.requirements(shape)]

    # --- what kernels query, instead of how a format is composed ----------------------------------

    @property
    def nibbles(self) -> tuple[int, int] | None:
        """Return the right shifts that bring down the two codes of a byte, or None.

        They are (4, 0) where the high nibble comes first.
        """
        return self.packing.nibbles

    @property
    def in_bytes(self) -> bool:
        """Whether each code is a byte, in the order of the elements."""
        return self.packing.bits == 8

    @property
    def scaled_bytes(self) -> bool:
        """Whether each code is a byte whose value is computed, and one scale is all else."""
        looked_up = self.table is not None or self.codec.values is not None
        return self.in_bytes and len(self.shared) == 1 and not looked_up

    @property
    def planes(self) -> int:
        """Return how many bit planes hold the codes, in blocks of 32; 0 where none do."""
        return self.packing.planes

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Return the word and the lowest bit in it of each of some neighbours in a row, which
        have the words that the packing loads for them to themselves; empty for another packing."""
        return self.packing.places

    @property
    def lut16(self) -> tuple[float, ...] | None:
        """Return the values of 16 codes, if such a value times one scale is all; else None."""
        values = self.codec.values
        one_scale = self.packing.bits == 4 and len(self.shared) == 1
        return values if one_scale and values is not None and len(values) == 16 else None

    @property
    def largest(self) -> float:
        """Return the largest magnitude that a code has before its one scale; 0 if none is known."""
        values = self.codec.values if len(self.shared) == 1 else None
        return max(map(abs, values)) if values else 0.0

    @property
    def table(self) -> Operand | None:
        """Return the operand that holds the values of codes, if one scale is all else; or None."""
        return self.codec.table if len(self.shared) == 1 else None

    @property
    def blockwise(self) -> Blockwise | None:
        """Describe the one scale to kernels that may know its kind; None where none does."""
        return self.shared[0].blockwise if len(self.shared) == 1 else None

    @cached_property
    def line(self) -> tuple[Line, Blockwise, Blockwise] | None:
        """Return how the values of 16 codes lie on a line, its scales and its zero points, which
        both have the same groups of columns; or None."""
        if self.packing.nibbles is None or self.codec.line is None or len(self.shared) != 2:
            return None
        scale, zero = (shared.grouped for shared in self.shared)
        if scale is None or zero is None or scale.block != zero.block:
            return None
        return self.codec.line, scale, zero

    def run(self, columns: int) -> int:
        """Return how many consecutive elements share all, from each multiple on; 0 means all."""
        return math.gcd(*(scale.run(columns) for scale in self.shared))

    def group(self, columns: int) -> int:
        """Return how many neighbours share all, from each multiple on in a row of `columns`."""
        return math.gcd(columns, self.run(columns))

    def period(self, columns: int) -> int:
        """Return a number of elements at whose multiples a weight can be cut into weights."""
        return math.lcm(
            self.packing.period(columns), *(scale.period(columns) for scale in self.shared)
        )

    @cached_property
    def plain(self) -> QuantFormat:
        """Return the format of the same codes under scales that are stored one by one."""
        shared = tuple(scale.plain or scale for scale in self.shared)
        if shared == self.shared:
            return self
        return replace(self, name=f"{self.name}_plain", shared=shared)

    @cached_property
    def by_rows(self) -> bool:
        """Whether the value of an element depends on how many columns the weight has."""
        return self._probe.by_rows

    @cached_property
    def _probe(self) -> _Probe:
        probe = _Probe()
        o: Any = probe  # operations that it does not define are no-ops
        self.decode(o, 0)
        return probe


class _Probe:
    """An interpreter that only notes which operands a decode reads and whether it goes by rows."""

    def __init__(self) -> None:
        self.seen: dict[str, None] = {}
        self.by_rows = False

    def load(self, name: str, *index: Any) -> int:
        self.seen.setdefault(name)
        return 0

    gather = load

    def row(self, *index: Any) -> int:
        self.by_rows = True
        return 0

    column = columns = rows = row

    def __getattr__(self, name: str) -> Any:
        return lambda *args: 0


def lookup(formats: Mapping[str, QuantFormat], name: str) -> QuantFormat:
    """Return `formats[name]`, or raise an error that lists what is known."""
    try:
        return formats[name]
    except KeyError:
        raise UnknownFormat(name=name, known=tuple(formats)) from None
