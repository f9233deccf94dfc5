"""The tile map of a routing on a GPU, in one launch."""

from __future__ import annotations

import importlib.util

from torch import Tensor

from inductor_q.kernels.gpu import on
from inductor_q.kernels.tile_map import WIDTH_STEP, height, length


class Triton:
    name = "triton"

    def available(self) -> str:
        return "" if importlib.util.find_spec("triton") else "triton is not installed"

    def launch(self, offsets: Tensor, rows: int) -> Tensor:
        import triton

        from inductor_q.kernels.expert_rows_triton import tile_map

        experts = offsets.shape[0] - 1
        tiles = offsets.new_empty((length(rows, experts), 4))
        with on(offsets.device):
            tile_map[(experts,)](
                offsets.contiguous(),
                tiles,
                experts,
                tiles.shape[0] - 1,
                HEIGHT=height(rows, experts, offsets.device),
                STEP=WIDTH_STEP,
                EXPERTS=triton.next_power_of_2(experts),
            )
        return tiles


KERNEL = Triton()
