"""Bring rows in and out of grouped order in plain torch, for kernels that do not index rows.

Nothing here waits for the device. The words are those of `ops/routing.py`, which has a picture.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_q.kernels.expert_calls import Scatter2Scatter


def gather(x: Tensor, grouped: bool, order: Tensor, top_k: int) -> Tensor:
    """Return the rows of `x`, one per slot, in grouped order: [R, K]."""
    return x if grouped else x[order // top_k]


def owned(rows: int, offsets: Tensor) -> Tensor:
    """Return which grouped rows belong to an expert: [R, 1] bool."""
    return (torch.arange(rows, device=offsets.device) < offsets[-1]).unsqueeze(1)


def expert_of_row(rows: int, offsets: Tensor) -> Tensor:
    """Return the expert of each grouped row, E for nobody's: [R] int64."""
    index = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    return torch.searchsorted(offsets[1:], index, right=True)


def scatter(y: Tensor, call: Scatter2Scatter) -> Tensor:
    """Make the op's result of the grouped rows `y` [R, N] without gates; nobody's rows may hold
    anything, as a grouped product leaves them."""
    if call.grouped_out:
        if call.gates is not None:
            y = (y * call.gates.reshape(-1, 1)[call.order].float()).to(y.dtype)
        return torch.where(owned(call.rows, call.offsets), y, 0)
    total = torch.zeros(
        (call.tokens, call.out_features),
        dtype=torch.promote_types(y.dtype, torch.float32),
        device=y.device,
    )
    places = call.inverse.reshape(call.tokens, call.top_k)
    for j in range(call.top_k):  # this never makes [R, N] in float32
        place = places[:, j]
        part = torch.where((place < call.offsets[-1]).unsqueeze(1), y[place], 0)
        if call.gates is None:
            total += part
        else:
            total.addcmul_(part, call.gates[:, j : j + 1].to(total.dtype))
    return total.to(y.dtype)
