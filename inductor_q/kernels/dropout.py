"""The random numbers of dropout: which element gets which 16 bits of which Philox call.

One call gives four numbers. They go to rows that lie ROWS apart, so that a kernel uses them for four
tiles of one layout, and no number changes its lane.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 64
CALL_ROWS = 4 * ROWS
#: The constants of Philox-2x32 (Random123): the multiplier, and what a round adds to the key.
MULTIPLIER = 0xD256D193
WEYL = 0x9E3779B9
ROUNDS = 10
#: Where an adapter's number stands in the counter, above the column's.
ADAPTER_SHIFT = 24

_LOW = 0xFFFFFFFF


def threshold(p: float) -> int:
    """Return the least 16-bit number under which an element is kept."""
    return round(p * 2**16)


def keep_mask(seed: Tensor, rows: int, columns: int, adapter: int, p: float) -> Tensor:
    """Return which elements of an input [rows, columns] an adapter keeps, as bool."""
    row = torch.arange(rows, device=seed.device).unsqueeze(1)
    column = torch.arange(columns, device=seed.device).unsqueeze(0)
    first, second = _philox(
        row // CALL_ROWS * ROWS + row % ROWS, column | (adapter << ADAPTER_SHIFT), seed
    )
    place = row % CALL_ROWS // ROWS
    word = torch.where(place < 2, first, second)
    return ((word >> (place % 2 * 16)) & 0xFFFF) >= threshold(p)


def _philox(c0: Tensor, c1: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Philox-2x32 in int64, which wraps around as unsigned numbers do.

    The key has 32 bits: the rest of the seed is mixed into the counter.
    """
    key, rest = seed & _LOW, (seed >> 32) & _LOW
    c1 = c1 ^ rest
    for _ in range(ROUNDS):
        product = c0 * MULTIPLIER
        c0, c1 = ((product >> 32) & _LOW) ^ key ^ c1, product & _LOW
        key = (key + WEYL) & _LOW
    return c0, c1
