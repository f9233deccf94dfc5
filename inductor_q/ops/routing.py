"""Which rows go to which expert: computed once per layer, on the device, for all its projections.

The picture has 4 tokens with top_k = 2 choices each, among experts 0, 1 and 2 on this device:

    token      0       1       2       3
    slot       0   1   2   3   4   5   6   7      slot // top_k is its token
    expert     1   0   2   1   1   -   0   1      "-" is the id of an expert of another device
                      |
                      v  stable sort by expert
    row        0   1   2   3   4   5   6   7
    order      1   6   0   3   4   7   2   5      the slot of each row
    expert     0   0   1   1   1   1   2   -      the last row is nobody's
    offsets    0       2               6   7      where each expert's rows start, and all end
    parts     [0   0] [1   1] [1   1] [2]         if a part had 2 rows at most

- A *slot* is one choice of one token: slot `s` is choice `s % top_k` of token `s // top_k`.
- A *row* is a place in the sorted order. Rows in *grouped* order are the slots sorted by expert, so
  that each expert's rows lie together; *sorted* means the same. `order` gives the slot of a row,
  `inverse` the row of a slot.
- Rows in *scattered* order are the tokens as the model has them, one row per token.
- A *sentinel* is the id of an expert that is not on this device. Its slots come last, and their
  rows are *nobody's*: they are skipped, and zero in every result.
- A *part* is a run of one expert's rows, of a height that is the same for all parts but an expert's
  last. `Routing.tiles` lists them (`qfuse::tile_map`).
- A *tile* is what one program of a kernel computes: rows of a part, or of a piece of one, times
  some columns of that expert's weight.

Shapes depend on the number of tokens only, never on where they go, and nothing waits for the
device: a layer compiles with fullgraph=True.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from inductor_q.ops.tile_map import tile_map


class Routing(NamedTuple):
    """The plan of one layer. R = tokens * top_k slots, E experts.

    order: [R] int64, the slot of each row; slots of sentinels come last.
    inverse: [R] int64, the row of each slot.
    offsets: [E + 1] int32; expert e has the rows offsets[e] to offsets[e + 1]. Rows from offsets[E]
        on are nobody's.
    tiles: [1 + E + R // 32, 4] int32, each expert's rows in parts (`ops.tile_map`), for the kind of
        device that it was made on: elsewhere, route again.
    top_k: choices per token.
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
