"""`qfuse::compare`: hand on a product in 16 bits, and note how far the one in eight bits is off."""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_q import comparison
from inductor_q.ops.library import define


def _compare(exact: Tensor, other: Tensor, layer: str, forward: bool) -> Tensor:
    wide = exact.to(torch.float32)
    error = other.to(torch.float32) - wide
    norms = torch.stack([wide.square().sum(), error.square().sum()]).double()
    for collected in comparison.active():
        collected.add(layer, forward, norms)
    return exact.clone()


def _fake_compare(exact: Tensor, other: Tensor, layer: str, forward: bool) -> Tensor:
    return torch.empty_like(exact)


def define_compare() -> None:
    """Define the op. What it notes is no part of a CUDA graph."""
    define(
        "compare(Tensor exact, Tensor other, str layer, bool forward) -> Tensor",
        _compare,
        _fake_compare,
        tags=(torch.Tag.cudagraph_unsafe,),
    )
