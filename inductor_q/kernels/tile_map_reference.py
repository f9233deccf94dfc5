"""`qfuse::tile_map` in plain torch: the semantics."""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_q.kernels.expert_calls import TileMap
from inductor_q.kernels.provider import REFERENCE, Provider
from inductor_q.kernels.tile_map import WIDTH_STEP, height, length


class Reference(Provider[TileMap]):
    name = REFERENCE

    def run(self, call: TileMap) -> Tensor:
        return reference(call.offsets, call.rows)


def reference(offsets: Tensor, rows: int) -> Tensor:
    """Compute the op in plain torch, with zeros behind the parts."""
    num_experts = offsets.shape[0] - 1
    most = height(rows, num_experts, offsets.device)
    owned = offsets.diff()
    parts = (owned + most - 1) // most
    width = (owned + parts - 1).div(parts.clamp(min=1), rounding_mode="floor")
    width = (width + WIDTH_STEP - 1) // WIDTH_STEP * WIDTH_STEP
    until = parts.cumsum(0, dtype=torch.int32)
    count = until[-1:].clamp(max=length(rows, num_experts) - 1)  # offsets may exceed the rows
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


KERNEL = Reference()
