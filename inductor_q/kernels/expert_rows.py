"""Rows in and out of grouped order, in plain torch: what kernels without indices of their own use.

Nothing here waits for the device. The words are those of `ops/routing.py`, which has a picture.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_q.kernels.calls import Scatter2Scatter


def gather(x: Tensor, grouped: bool, order: Tensor, top_k: int) -> Tensor:
    """[R, K]: the rows of `x`, one a slot, in grouped order."""
    return x if grouped else x[order // top_k]


def owned(rows: int, offsets: Tensor) -> Tensor:
    """[R, 1] bool: which grouped rows belong to an expert."""
    return (torch.arange(rows, device=offsets.device) < offsets[-1]).unsqueeze(1)


def expert_of_row(rows: int, offsets: Tensor) -> Tensor:
    """[R] int64: the expert of each grouped row, E for nobody's."""
    index = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    return torch.searchsorted(offsets[1:], index, right=True)


def scatter(y: Tensor, call: Scatter2Scatter) -> Tensor:
    """The op's result from the grouped rows `y` [R, N] without gates; nobody's rows may be
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
    for j in range(call.top_k):  # not [R, N] in float32 at once
        place = places[:, j]
        part = torch.where((place < call.offsets[-1]).unsqueeze(1), y[place], 0)
        if call.gates is None:
            total += part
        else:
            total.addcmul_(part, call.gates[:, j : j + 1].to(total.dtype))
    return total.to(y.dtype)
