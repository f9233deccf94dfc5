"""A tile map lists each expert's rows in parts that a grouped GEMM takes as tiles.

`ops/routing.py` has a picture of rows and parts. The height of a part depends on the number of rows
and the device alone; a kernel with lower tiles cuts each part again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_q.exc import WrongDtype, WrongShape

LOWEST = 32  # rows that a part may have at least, on every device: the map's length depends on it
WIDTH_STEP = 16  # rows that a matrix instruction takes

#: (from how many rows per expert on average, how many rows a part has at most). The steps are
#: those of the kernel for Hopper, whose highest tile no other GPU has the shared memory for.
HEIGHTS = ((96, 256), (48, 128), (16, 64), (0, LOWEST))
HIGHEST = {(9, 0): 256}
HIGHEST_ELSEWHERE = 128


def height(rows: int, num_experts: int, device: torch.device) -> int:
    """Return how many rows a part of the map has at most."""
    average = rows / max(1, num_experts)
    wanted = next(most for least, most in HEIGHTS if average >= least)
    if device.type != "cuda":
        return min(wanted, HIGHEST_ELSEWHERE)
    return min(wanted, HIGHEST.get(torch.cuda.get_device_capability(device), HIGHEST_ELSEWHERE))


def length(rows: int, num_experts: int) -> int:
    """Return how many parts a map has room for: enough for every choice of experts."""
    return 1 + num_experts + rows // LOWEST


def check_tiles(tiles: Tensor, rows: int, num_experts: int) -> None:
    """Raise unless `tiles` is a map for that many rows and experts."""
    if tiles.dtype is not torch.int32:
        raise WrongDtype(what="tile map of a routing", expected=torch.int32, got=tiles.dtype)
    if not tiles.is_contiguous():
        what = "strides of the tile map of a routing"
        raise WrongShape(what=what, expected=(4, 1), got=tuple(tiles.stride()))
    expected = (length(rows, num_experts), 4)
    if tuple(tiles.shape) != expected:
        raise WrongShape(what="tile map of a routing", expected=expected, got=tuple(tiles.shape))
