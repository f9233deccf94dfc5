"""Capture attention in Dynamo's graphs, and make a causal mask as models write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

GROUPED = "sdpa, grouped keys"


def captured(fn: Callable[..., Any], *args: Any, dynamic: bool = False) -> fx.GraphModule:
    """Return Dynamo's graph of a function."""
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(gm)
        return gm.forward

    torch.compiler.reset()
    torch.compile(fn, backend=keep, dynamic=dynamic, fullgraph=True)(*args)
    (graph,) = graphs
    return graph


def positions(x: Tensor) -> tuple[Tensor, Tensor]:
    at = torch.arange(x.shape[1], device=x.device)
    return at[None, None, :, None], at[None, None, None, :]


def causal(x: Tensor) -> Tensor:
    q, k = positions(x)
    return (k <= q).expand(x.shape[0], 1, -1, -1)
