"""passes/graph.py: the verbs that every pass uses."""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode

from inductor_q.passes.graph import CAT, emit, replace

aten = torch.ops.aten


def test_emit_reads_what_stands_in_for_a_replaced_node() -> None:
    """A plan may name a node that an earlier site has replaced, and whose replacement, too."""
    graph, mode = fx.Graph(), FakeTensorMode()
    x = graph.placeholder("x")
    x.meta["val"] = mode.from_tensor(torch.empty(2))
    with V.set_fake_mode(mode):
        first, second, third = (
            emit(graph, op.default, (x,), x) for op in (aten.sin, aten.cos, aten.neg)
        )
        reader = emit(graph, aten.exp.default, (first,), x)
        replace(first, second)
        replace(second, third)
        late = emit(graph, CAT, ([first, x],), x)
    assert reader.all_input_nodes == [third]
    assert late.all_input_nodes == [third, x]
