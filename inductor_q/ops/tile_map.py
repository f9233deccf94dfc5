"""`qfuse::tile_map`: each expert's rows in parts that a grouped GEMM takes as tiles.

Made once for a layer's routing and read by all its products, forward and backward, so a program
finds its expert with one load. How high a part is depends on how many rows there are and on the
device alone (`kernels.tiles.height`); a kernel with lower tiles cuts each part again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_q.exc import WrongDtype, WrongShape
from inductor_q.ops.library import define

LOWEST = 32  # rows that a part may have at least, on every device: the map's length goes by it
WIDTH_STEP = 16  # rows that a matrix instruction takes


def tile_map(offsets: Tensor, rows: int) -> Tensor:
    """Each expert's rows in as few parts as hold them, all but the last of one height.

    Args:
        offsets: [E + 1] int32 of a `Routing`.
        rows: R, all the slots, nobody's among them.

    Returns:
        [1 + E + R // 32, 4] int32: the number of parts comes first, [0, 0]; then for each its
        expert, first row, number of rows, and a 0. What is behind them is not specified. It is for
        the kind of device that `offsets` is on.
    """
    result: Tensor = torch.ops.qfuse.tile_map(offsets, rows)
    return result


def length(rows: int, num_experts: int) -> int:
    """Of a map: enough for every choice of experts, and one number of rows has one."""
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


def reference(offsets: Tensor, rows: int) -> Tensor:
    """The op in plain torch, zeros behind the parts."""
    from inductor_q.kernels.tiles import height  # kernels sit above ops

    num_experts = offsets.shape[0] - 1
    most = height(rows, num_experts, offsets.device)
    owned = offsets.diff()
    parts = (owned + most - 1) // most
    width = (owned + parts - 1).div(parts.clamp(min=1), rounding_mode="floor")
    width = (width + WIDTH_STEP - 1) // WIDTH_STEP * WIDTH_STEP
    until = parts.cumsum(0, dtype=torch.int32)
    count = until[-1:].clamp(max=length(rows, num_experts) - 1)  # of more rows than there are
    index = torch.arange(length(rows, num_experts) - 1, dtype=torch.int32, device=offsets.device)
    expert = torch.searchsorted(until, index, right=True).clamp(max=num_experts - 1)
    done = (index - until[expert] + parts[expert]) * width[expert]
    tiles = torch.stack(
        [
            expert.to(torch.int32),
            offsets[expert] + done,
            torch.minimum(owned[expert] - done, width[expert]),
            torch.zeros_like(index),
        ],
        1,
    )
    tiles = torch.where((index < count).unsqueeze(1), tiles, 0)
    return torch.cat([torch.nn.functional.pad(count, (0, 3)).unsqueeze(0), tiles])


def run(offsets: Tensor, rows: int) -> Tensor:
    """By the first kernel of the device; by `reference` where there is none."""
    from inductor_q.kernels import TILE_MAP  # kernels sit above ops

    for kernel in TILE_MAP.get(offsets.device.type, ()):
        if not kernel.available():
            return kernel.launch(offsets, rows)
    return reference(offsets, rows)


def _tile_map(offsets: Tensor, rows: int) -> Tensor:
    if offsets.dtype is not torch.int32:
        raise WrongDtype(what="offsets of a routing", expected=torch.int32, got=offsets.dtype)
    if offsets.dim() != 1 or offsets.shape[0] < 2:
        got = tuple(offsets.shape)
        raise WrongShape(what="offsets of a routing", expected="(experts + 1,)", got=got)
    return run(offsets, rows)


def _fake(offsets: Tensor, rows: int) -> Tensor:
    return offsets.new_empty((length(rows, offsets.shape[0] - 1), 4))


def define_tile_map() -> None:
    define("tile_map(Tensor offsets, SymInt rows) -> Tensor", _tile_map, _fake)
