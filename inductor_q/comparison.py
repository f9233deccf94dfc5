"""Collect how far products in eight bits are off, for `qfuse explain --numerics`.

While `comparing` is in force, graphs are compiled with both products of each layer, of the same
inputs, and go on with the one in 16 bits (`qfuse::compare`): every error is a layer's own, and the
program runs as it would without. This file imports no torch: an observed program does that itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Comparison:
    """Sum up squared norms, of a layer's products and of their errors, forward and in backward.

    They stay tensors on their device until they are read, so that no step waits for them.
    """

    norms: dict[tuple[str, bool], Any] = field(default_factory=dict)

    def add(self, layer: str, forward: bool, norms: Any) -> None:
        key = layer, forward
        self.norms[key] = self.norms[key] + norms if key in self.norms else norms

    def errors(self) -> dict[str, dict[bool, float]]:
        """Return the error of each layer's products relative to their norm; by True forward."""
        found: dict[str, dict[bool, float]] = {}
        for (layer, forward), sums in self.norms.items():
            product, error = sums.tolist()
            found.setdefault(layer, {})[forward] = (error / product) ** 0.5 if product else 0.0
        return found


_active: list[Comparison] = []


@contextlib.contextmanager
def comparing() -> Iterator[Comparison]:
    """Let graphs that are compiled in the block compare, and collect what they find in it."""
    comparison = Comparison()
    _active.append(comparison)
    try:
        yield comparison
    finally:
        _active.remove(comparison)


def active() -> tuple[Comparison, ...]:
    return tuple(_active)
