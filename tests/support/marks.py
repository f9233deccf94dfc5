"""Have torch mark a checkpointed segment as an older version does."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from inductor_q.passes import recompute_products, runner
from inductor_q.passes.graph import arg, is_view


def as_torch_2_11_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the marks from products of packed weights and from what decodes these, which torch 2.11
    does not give them."""

    def listen(step: runner.Pass, graph: fx.Graph, when: str) -> None:
        if step.name == "recompute_products" and when == "before":
            for node in graph.nodes:
                if recompute_products._is_wide(node):
                    for one in (node, *_decoding(node)):
                        one.meta.pop("recompute", None)
                        one.meta.pop("ac_graph_id", None)

    monkeypatch.setattr(runner, "listeners", [listen])


def _decoding(product: fx.Node) -> list[fx.Node]:
    """List what decodes the weight of a product: a decode, and views of it."""
    nodes = [arg(product, 1)]
    while is_view(nodes[-1]):
        nodes.append(arg(nodes[-1], 0))
    return nodes if nodes[-1].target is torch.ops.qfuse.dequantize.default else []
