"""Describe what an operand of a format has to be for a weight of a given shape."""

from __future__ import annotations

from dataclasses import dataclass

FLOATS = ("float32", "bfloat16", "float16")
"""The dtypes of a scale that is not quantized itself; checkpoints store any of them."""


@dataclass(frozen=True)
class Operand:
    """`numel` elements of one of `dtypes` (torch's names).

    Without dtypes, `numel` counts bytes and any dtype may hold them, as bitsandbytes'
    `quant_storage` allows: a wider one rounds the count up to its own size.
    """

    name: str
    numel: int
    dtypes: tuple[str, ...]
