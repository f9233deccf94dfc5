"""The experts that some token has chosen: fewer than all where there are few tokens.

Only the device knows how many they are. The host knows that R rows have at most R experts, so
everything here has room for A = min(E, R) of them, and experts without rows take the places that
are left: shapes depend on the number of rows only, and nothing waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class ActiveExperts(NamedTuple):
    """A of the experts: those with rows come first, in their order.

    ids: [A] int64, their numbers among all.
    offsets: [A + 1] int32, as in a `Routing` over these experts alone: the grouped order of the
        rows is the same, since experts without rows have no part in it.
    """

    ids: Tensor
    offsets: Tensor


def active_experts(offsets: Tensor, rows: int) -> ActiveExperts:
    """Find the experts with rows in a routing's `offsets` [E + 1] over `rows` slots."""
    counts = offsets.diff()
    idle_last = torch.argsort((counts == 0).to(torch.uint8), stable=True)
    ids = idle_last[: min(counts.shape[0], rows)]
    ends = torch.cumsum(counts[ids], 0, dtype=torch.int32)
    return ActiveExperts(ids, pad(ends, (1, 0)))


def select_adapter(lora_a: Tensor, lora_b: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    """Copy the adapters, [E, r, K] and [E, N, r], of the experts with the numbers `experts` [A]."""
    return lora_a.index_select(0, experts), lora_b.index_select(0, experts)
