"""passes/graph.py: the verbs that every pass uses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode

from inductor_q import testing
from inductor_q.capture.example import SPREAD
from inductor_q.passes.graph import CAT, emit, likely_rows, replace, too_few_rows
from tests.support.compiling import compile_step, no_codegen

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


def varying(*dims: int, bound: int | None = None) -> fx.Node:
    """Make a node of [3, 10, 4] where the sizes of `dims` vary, the last of them up to `bound`."""
    x = torch.empty(3, 10, 4)
    for dim in dims:
        limits: Any = {} if bound is None else {"min": 2, "max": bound}
        torch._dynamo.mark_dynamic(x, dim, **limits)
    found: list[Any] = []

    def keep(gm: fx.GraphModule, example_inputs: Any) -> Any:
        found.extend(gm.graph.find_nodes(op="placeholder"))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=keep)(x)
    node: fx.Node = found[-1]
    node.meta["val"] = node.meta["example_value"]
    return node


@pytest.mark.parametrize(
    ("dims", "bound", "most"),
    [((), None, 30), ((1,), None, 30 * SPREAD), ((0, 1), None, 30 * SPREAD), ((1,), 20, 60)],
    ids=["fixed", "varies", "both vary", "bounded"],
)
def test_rows_where_lengths_vary(dims: tuple[int, ...], bound: int | None, most: int) -> None:
    node = varying(*dims, bound=bound)
    assert likely_rows(node) == most
    context: Any = SimpleNamespace(threshold=lambda name: most + 1)
    reason = too_few_rows(node, "the.threshold", context)
    others = f", and likely up to {most} in other batches" if dims else ""
    assert reason == f"30 rows{others}, fewer than the.threshold={most + 1} of the preset"
    context = SimpleNamespace(threshold=lambda name: most)
    assert too_few_rows(node, "the.threshold", context) == ""


@pytest.mark.parametrize("varies", [False, True], ids=["fixed", "varies"])
def test_a_short_first_batch_keeps_no_pass_from_long_ones(varies: bool) -> None:
    """extend_k asks for 64 rows: the batch at hand has 16, and others may have 128."""
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    layer = testing.lora_linear(64, 64)
    x = torch.randn(2, 8, 64, dtype=torch.bfloat16, requires_grad=True)
    if varies:
        torch._dynamo.mark_dynamic(x, 1)
    options = {"qfuse.thresholds": {"extend_k.min_rows": 64}}

    def run(x: Tensor) -> Tensor:
        y: Tensor = layer(x.tanh())
        return y.tanh()

    result = compile_step(run, x, module=layer, options=options, context=no_codegen())
    assert bool(result.applied.get("extend_k")) is varies
