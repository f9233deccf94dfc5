"""Capture attention in Dynamo's graphs, and make a causal mask as models write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

GROUPED = "sdpa, grouped keys"
VALID_FIRST = f"sdpa, valid first{GROUPED.removeprefix('sdpa')}"
DOCUMENTS = "FlexAttention of documents"

LAYERS = 2  # of the models of test_causal_attention*.py
WINDOW = 16  # of their layers that have one
PASS = "causal_attention"
ALWAYS: dict[str, Any] = {"qfuse.thresholds": {"causal_attention.min_positions": 0}}


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


def batch(case: str, length: int) -> dict[str, Tensor]:
    """Inputs of two rows; a case is what of `padded` and `documents` it names."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1, 200, (2, length), generator=generator)
    inputs = {"input_ids": ids, "labels": ids.clone()}
    if "padded" in case:
        mask = torch.ones_like(ids)
        mask[0, -5:], mask[1, :7], mask[1, 9:11] = 0, 0, 0
        labels = ids.masked_fill(mask == 0, -100)
        labels[1, 11] = -100  # as above: padding comes before it
        inputs |= {"attention_mask": mask, "labels": labels}
    if "documents" in case:
        places = torch.arange(length)
        rows = [torch.where(places < n, places, places - n) for n in (length // 3, length // 2)]
        inputs["position_ids"] = torch.stack(rows)
    return inputs


def plain_step(call: Any, model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """The loss, and all gradients."""
    model.zero_grad()
    loss = call(use_cache=False, **inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
