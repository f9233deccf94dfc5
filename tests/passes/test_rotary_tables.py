"""rotary_tables: cosines and sines of positions become tensors that all layers read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import inductor_q
from inductor_q import lowerings, testing
from inductor_q.passes.products import MATERIALIZE
from inductor_q.passes.rotary_tables import RotaryTables
from inductor_q.passes.runner import Site
from tests.support.compiling import partition

for extra in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(extra)

LENGTH = 24
lowerings.register()


def step(run: Any) -> None:
    ids = torch.randint(0, 256, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    run(input_ids=ids, labels=ids).loss.backward()


def applied() -> int:
    report = inductor_q.last_report()
    assert report is not None
    return report.applied()["rotary_tables"]


def test_two_tables_serve_every_layer() -> None:
    config = testing.tiny_llama_config(num_hidden_layers=2)
    model = testing.qlora_model(config, adapter_dtype=torch.bfloat16)
    forward, backward = partition(step, model)
    assert applied() == 2
    made = forward.find_nodes(op="call_function", target=MATERIALIZE)
    assert [n.meta["val"].shape[-2:] for n in made] == [(LENGTH, config.head_dim)] * 2
    assert {n.meta["val"].dtype for n in made} == {torch.bfloat16}
    # Backward reads them too, and computes no cosine.
    assert set(made) <= set(next(iter(forward.find_nodes(op="output"))).all_input_nodes)
    for target in (torch.ops.aten.cos.default, torch.ops.aten.sin.default):
        assert len(forward.find_nodes(op="call_function", target=target)) == 1
        assert not backward.find_nodes(op="call_function", target=target)


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    cos, sin = angle.cos() * 2.0, angle.sin() * 2.0
    return x * cos[:, None] + x.flip(-1) * sin[:, None] * cos[:, None]


def matched(run: Any, *args: Tensor) -> tuple[fx.GraphModule, list[Site]]:
    traced = make_fx(run, tracing_mode="fake")(*args)
    context: Any = None  # which this pass does not ask
    return traced, list(RotaryTables().match(traced.graph, context))


def test_what_is_read_more_than_once_for_more_elements() -> None:
    x, angle = torch.randn(2, 3, 10, 8), torch.randn(2, 10, 8)
    traced, sites = matched(rotate, x, angle)
    (site,) = sites  # the sine is read in one place only
    assert site.node.target is torch.ops.aten.cos.default
    assert site.plan.target is torch.ops.aten.mul.Tensor
    RotaryTables().apply(traced.graph, site, None)  # type: ignore[arg-type]
    traced.recompile()
    assert "qfuse.materialize" in traced.code
    torch.testing.assert_close(traced(x, angle), rotate(x, angle))


@pytest.mark.parametrize(
    "run",
    [lambda x: x * x[0].cos(), lambda x: x[0].cos() + x[0].cos() * x[1]],
    ids=["read once", "for no more elements"],
)
def test_others_stay(run: Any) -> None:
    assert matched(run, torch.randn(4, 10, 8))[1] == []


def test_a_result_keeps_its_layout() -> None:
    """gpt-oss has tables that are transposed, and a module may return what its layers read."""

    def run(x: Tensor, angle: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        table = angle.mT.cos()
        return x * table[:, None] + x.flip(-1) * table[:, None], table, table[:, None]

    x, angle = torch.randn(2, 3, 10, 8), torch.randn(2, 8, 10)
    traced, (site,) = matched(run, x, angle)
    RotaryTables().apply(traced.graph, site, None)  # type: ignore[arg-type]
    traced.recompile()
    for got, expected in zip(traced(x, angle), run(x, angle), strict=True):
        torch.testing.assert_close(got, expected, check_stride=True)
    (made,) = traced.graph.find_nodes(op="call_function", target=MATERIALIZE)
    assert made.meta["val"].is_contiguous() and len(made.users) == 2
