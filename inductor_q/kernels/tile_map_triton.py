"""The tile map of a routing on a GPU, in one launch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from inductor_q.kernels.expert_calls import TileMap
from inductor_q.kernels.provider import TritonProvider
from inductor_q.kernels.tile_map import WIDTH_STEP, height, length
from inductor_q.kernels.triton_launch import Repeated


class Triton(TritonProvider[TileMap]):
    def plan(self, call: TileMap) -> Callable[[TileMap], Tensor]:
        import triton

        from inductor_q.kernels.expert_rows_triton import tile_map

        rows, experts = call.rows, call.num_experts
        shape = (length(rows, experts), 4)
        launch = Repeated(
            tile_map,
            (experts, 1, 1),
            (experts, shape[0] - 1),
            {
                "HEIGHT": height(rows, experts, call.device),
                "STEP": WIDTH_STEP,
                "EXPERTS": triton.next_power_of_2(experts),
            },
        )

        def serve(call: TileMap) -> Tensor:
            tiles = call.offsets.new_empty(shape)
            launch((call.offsets.contiguous(), tiles))
            return tiles

        return serve


KERNEL = Triton()
