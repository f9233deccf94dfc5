"""One description per format; everything else interprets `QuantFormat.decode`.

`decode(o, i)` is written once against a small set of operations `o` and run by the interpreters in
`inductor_q.decode`: eager torch (the reference and the fake), Inductor's loop-level ops (the
lowering) and a printer of Triton device code. Nothing here knows torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from inductor_q.exc import UnknownFormat
from inductor_q.formats.codec import Codec
from inductor_q.formats.operand import Operand
from inductor_q.formats.packing import Packing
from inductor_q.formats.scale import Scale


@dataclass(frozen=True)
class QuantFormat:
    """A quantized weight: packing (index -> code), codec (code -> value), scale (index -> scale).

    Frozen, hashable and comparable. Only `name` crosses an operator schema.
    """

    name: str
    packing: Packing
    codec: Codec
    scale: Scale

    def __hash__(self) -> int:
        return hash(self.name)  # of all the rest it would take as long as a launch

    def decode(self, o: Any, i: Any) -> Any:
        """Element `i` of the flattened weight in float32."""
        return self.decode_code(o, self.packing.code(o, i), self.scale.decode(o, i))

    def decode_code(self, o: Any, code: Any, scale: Any) -> Any:
        """The value of one `code` under its `scale`: what tile decoders call once per lane."""
        return o.mul(self.codec.decode(o, code), scale)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Operand names in first-use order, found by running `decode`, never written by hand."""
        probe = _Probe()
        self.decode(probe, 0)
        return tuple(probe.seen)

    def requirements(self, numel: int) -> tuple[Operand, ...]:
        """What each of `operands`, in their order, has to be for a weight of `numel` elements."""
        parts = (
            *self.packing.operands(numel),
            *self.scale.operands(numel),
            *self.codec.operands(),
        )
        by_name = {operand.name: operand for operand in parts}
        return tuple(by_name[name] for name in self.operands)


class _Probe:
    """An interpreter that only notes which operands a decode reads."""

    def __init__(self) -> None:
        self.seen: dict[str, None] = {}

    def load(self, name: str, *index: Any) -> int:
        self.seen.setdefault(name)
        return 0

    gather = load

    def __getattr__(self, name: str) -> Any:
        return lambda *args: 0


def lookup(formats: Mapping[str, QuantFormat], name: str) -> QuantFormat:
    """`formats[name]`, or an error that lists what is known."""
    try:
        return formats[name]
    except KeyError:
        raise UnknownFormat(name=name, known=tuple(formats)) from None
