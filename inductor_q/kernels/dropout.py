"""The random numbers of dropout: which element gets which eight bits of which Philox call.

One call gives 16 numbers: to eight neighbours in a row, as a lane loads them at once, and to the
eight that lie ROWS rows below, so that no number changes its lane.

Eight bits alone would round the rate to a multiple of 1/256. So the number under which an element
is dropped is one higher at a share of the places, which the seed shifts: over all seeds, each
element is dropped at a rate that is rounded to a multiple of 2**-16.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Rows of a tile, two of which share their calls, and columns of a call.
ROWS = 32
CALL_ROWS = 2 * ROWS
CALL_COLUMNS = 8
#: Philox-4x32 (Random123): multipliers, and what a round adds to the keys. Seven rounds are the
#: fewest that pass BigCrush (Salmon et al., table 2).
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 7
#: How much the shift of a place grows with its row and its column; both are odd, so in a period of
#: 256 rows or columns each shift comes once.
SHIFTS = (181, 77)

_LOW = 0xFFFFFFFF


def threshold(p: float) -> tuple[int, int]:
    """Return the least eight-bit number that is kept, and at how many of 256 places one more."""
    return divmod(round(p * 2**16), 256)


def keep_mask(seed: Tensor, rows: int, columns: int, adapter: int, p: float) -> Tensor:
    """Return which elements of an input [rows, columns] an adapter keeps, as bool."""
    row = torch.arange(rows, device=seed.device).unsqueeze(1)
    column = torch.arange(columns, device=seed.device).unsqueeze(0)
    r, c = row // CALL_ROWS * ROWS + row % ROWS, column // CALL_COLUMNS
    words = _philox(r, c, adapter, seed)
    left = torch.where(row % CALL_ROWS < ROWS, words[0], words[2])
    right = torch.where(row % CALL_ROWS < ROWS, words[1], words[3])
    word = torch.where(column % CALL_COLUMNS < 4, left, right)
    number = (word >> (column % 4 * 8)) & 0xFF
    least, higher = threshold(p)
    shift = (r * SHIFTS[0] + c * SHIFTS[1] + (seed & _LOW)) & 0xFF
    return number >= least + (shift < higher).long()


def _philox(row: Tensor, column: Tensor, adapter: int, seed: Tensor) -> tuple[Tensor, ...]:
    """Compute the four words of a call in int64, which wraps around as unsigned numbers do."""
    keys = [seed & _LOW, (seed >> 32) & _LOW]
    c0, c1, c2, c3 = row, column, torch.full_like(seed, adapter), torch.zeros_like(seed)
    for _ in range(ROUNDS):
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = ((second >> 32) & _LOW) ^ c1 ^ keys[0], second & _LOW
        c2, c3 = ((first >> 32) & _LOW) ^ c3 ^ keys[1], first & _LOW
        keys = [(key + weyl) & _LOW for key, weyl in zip(keys, WEYL, strict=True)]
    return c0, c1, c2, c3
