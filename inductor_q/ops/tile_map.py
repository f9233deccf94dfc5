"""`qfuse::tile_map`: each expert's rows in parts that a grouped GEMM takes as tiles.

It is made once for a layer's routing and read by all its products, forward and backward, so a
program finds its expert with one load. The height of a part depends on the number of rows and the
device alone (`kernels.tile_map.height`); a kernel with lower tiles cuts each part again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_q.exc import WrongDtype, WrongShape
from inductor_q.kernels.dispatch import serve
from inductor_q.kernels.expert_calls import TileMap
from inductor_q.kernels.tile_map import length
from inductor_q.ops.library import define


def tile_map(offsets: Tensor, rows: int) -> Tensor:
    """Cut each expert's rows into as few parts as hold them, all but the last of one height.

    Args:
        offsets: [E + 1] int32 of a `Routing`.
        rows: R, all the slots, nobody's among them.

    Returns:
        [1 + E + R // 32, 4] int32: the number of parts comes first, [0, 0]; then for each its
        expert, first row, number of rows, and a 0. The rest is not specified. The map is for the
        kind of device that `offsets` is on.
    """
    result: Tensor = torch.ops.qfuse.tile_map(offsets, rows)
    return result


def _tile_map(offsets: Tensor, rows: int) -> Tensor:
    if offsets.dtype is not torch.int32:
        raise WrongDtype(what="offsets of a routing", expected=torch.int32, got=offsets.dtype)
    if offsets.dim() != 1 or offsets.shape[0] < 2:
        got = tuple(offsets.shape)
        raise WrongShape(what="offsets of a routing", expected="(experts + 1,)", got=got)
    result: Tensor = serve("tile_map", TileMap(offsets, rows))
    return result


def _fake(offsets: Tensor, rows: int) -> Tensor:
    return offsets.new_empty((length(rows, offsets.shape[0] - 1), 4))


def define_tile_map() -> None:
    define("tile_map(Tensor offsets, SymInt rows) -> Tensor", _tile_map, _fake)
