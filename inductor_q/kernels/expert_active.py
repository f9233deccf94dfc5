"""The experts that some token has chosen: fewer than all where there are few tokens.

How many they are is known on the device only. What the host knows is that R rows have at most R
experts, so everything here has room for A = min(E, R) of them, the places left over being taken by
experts without rows: shapes depend on the number of rows only, and nothing waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class ActiveExperts(NamedTuple):
    """A experts, those with rows first, in their order.

    ids: [A] int64, their numbers among all.
    offsets: [A + 1] int32, as in a `Routing` over these experts alone: the grouped order of the
        rows is the same, since experts without rows have no part in it.
    """

    ids: Tensor
    offsets: Tensor


def active_experts(offsets: Tensor, rows: int) -> ActiveExperts:
    """The experts with rows, out of a routing's `offsets` [E + 1] over `rows` slots."""
    counts = offsets.diff()
    idle_last = torch.argsort((counts == 0).to(torch.uint8), stable=True)
    ids = idle_last[: min(counts.shape[0], rows)]
    ends = torch.cumsum(counts[ids], 0, dtype=torch.int32)
    return ActiveExperts(ids, pad(ends, (1, 0)))


def remap_expert_ids(expert_ids: Tensor, active: ActiveExperts, num_experts: int) -> Tensor:
    """What `route` takes for the active experts alone: a choice's place in `active.ids`.

    Args:
        expert_ids: [tokens, top_k], any integer dtype; sentinels are -1 afterwards.
        num_experts: E, of which `active` are some.
    """
    places = torch.full((num_experts + 1,), -1, dtype=torch.int64, device=expert_ids.device)
    numbers = torch.arange(active.ids.shape[0], device=expert_ids.device)
    places = places.scatter(0, active.ids, numbers)
    ours = (expert_ids >= 0) & (expert_ids < num_experts)
    return places[torch.where(ours, expert_ids, num_experts).long()]


def select_adapter(
    lora_a: Tensor, lora_b: Tensor, experts: Tensor, num_experts: int
) -> tuple[Tensor, Tensor]:
    """The adapters of the experts with the numbers `experts` [A], out of `num_experts`.

    Args:
        lora_a, lora_b: [E, r, K] and [E, N, r]; or as PEFT has them, A [E r, K] with an expert's
            rows together and B [N, r E] with an expert's columns E apart.

    Returns:
        Copies in the same layout, of A experts.
    """
    if lora_a.dim() == 3:
        return lora_a.index_select(0, experts), lora_b.index_select(0, experts)
    a = lora_a.unflatten(0, (num_experts, -1)).index_select(0, experts)
    b = lora_b.unflatten(1, (-1, num_experts)).index_select(2, experts)
    return a.flatten(0, 1), b.flatten(1)
