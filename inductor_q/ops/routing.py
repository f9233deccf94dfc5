"""Which rows go to which expert: computed once a layer, on the device, shared by its projections.

A *slot* is one choice of one token: slot `s` is choice `s % top_k` of token `s // top_k`. Rows in
*grouped* order are the slots sorted by expert, so each expert's rows lie together; rows in
*scattered* order are the tokens as the model has them. Shapes depend on the number of tokens only,
never on where they go, and nothing waits for the device: a layer compiles with fullgraph=True.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from inductor_q.ops.tile_map import tile_map


class Routing(NamedTuple):
    """The plan of one layer. R = tokens * top_k slots, E experts.

    order: [R] int64, the slot of each grouped row; slots that no expert here takes come last.
    inverse: [R] int64, the grouped row of each slot.
    offsets: [E + 1] int32; expert e has the grouped rows offsets[e] to offsets[e + 1]. Rows from
        offsets[E] on are nobody's: they are skipped, and zero in every result.
    tiles: [1 + E + R // 32, 4] int32, each expert's rows in parts (`ops.tile_map`), for the kind of
        device that it was made on: elsewhere, route again.
    top_k: choices a token.
    """

    order: Tensor
    inverse: Tensor
    offsets: Tensor
    tiles: Tensor
    top_k: int

    @property
    def num_experts(self) -> int:
        return self.offsets.shape[0] - 1


def route(expert_ids: Tensor, num_experts: int) -> Routing:
    """Sort the slots by expert; slots of one expert keep their order.

    Args:
        expert_ids: [tokens, top_k], any integer dtype. An id outside of [0, num_experts) is a
            sentinel of expert parallelism, -1 or num_experts and above: another device has it.
        num_experts: experts on this device.
    """
    tokens, top_k = expert_ids.shape
    ids = expert_ids.reshape(tokens * top_k)
    ids = torch.where((ids < 0) | (ids >= num_experts), num_experts, ids)
    # A radix sort takes a pass for each byte of the key.
    narrow = torch.int16 if num_experts < torch.iinfo(torch.int16).max else torch.int32
    grouped, order = torch.sort(ids.to(narrow), stable=True)
    experts = torch.arange(num_experts + 1, dtype=narrow, device=ids.device)
    offsets = torch.searchsorted(grouped, experts, out_int32=True)
    inverse = torch.empty_like(order)
    inverse = inverse.scatter(0, order, torch.arange(tokens * top_k, device=ids.device))
    return Routing(order, inverse, offsets, tile_map(offsets, tokens * top_k), top_k)
