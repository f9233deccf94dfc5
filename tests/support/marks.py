"""Have torch mark a checkpointed segment as an older version does."""

from __future__ import annotations

import pytest
from torch import fx

from inductor_q.passes import recompute_products, runner


def as_torch_2_11_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the marks from products of packed weights, which torch 2.11 does not give them."""

    def listen(step: runner.Pass, graph: fx.Graph, when: str) -> None:
        if step.name == "recompute_products" and when == "before":
            for node in graph.nodes:
                if recompute_products._is_wide(node):
                    node.meta.pop("recompute", None)
                    node.meta.pop("ac_graph_id", None)

    monkeypatch.setattr(runner, "listeners", [listen])
