"""The tile map of a routing on a GPU, in one launch."""

from __future__ import annotations

from torch import Tensor

from inductor_q.kernels.calls import TileMap
from inductor_q.kernels.gpu import on
from inductor_q.kernels.provider import TritonProvider
from inductor_q.kernels.tile_map import WIDTH_STEP, height, length


class Triton(TritonProvider[TileMap]):
    def run(self, call: TileMap) -> Tensor:
        import triton

        from inductor_q.kernels.expert_rows_triton import tile_map

        offsets, rows, experts = call.offsets, call.rows, call.num_experts
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
