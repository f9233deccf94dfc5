"""Experts under `qfuse.compute`: all of their products stay in 16 bits, and the report says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inductor_q.experts.modules import expert_layers
from inductor_q.passes.fold_lora import STRICT
from inductor_q.passes.quantize_products import EXPERTS as REASON
from tests.support.compiling import Compiled, compile_step, no_codegen
from tests.support.moe_models import EXPERTS, HIDDEN, model

parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")

BF16 = torch.bfloat16


class Layer(nn.Module):
    """A frozen layer in front of a tiny model's experts."""

    def __init__(self, implementation: str, *, packed: bool, trains: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=BF16).requires_grad_(False)
        net = model("qwen3_moe").to(BF16)
        self.experts: Any = expert_layers(net)["model.layers.0.mlp.experts"]
        self.experts.requires_grad_(trains)
        for name in ("gate_up_proj", "down_proj") if packed else ():
            parametrize.replace_parameter_4bit(self.experts, name)
        self.experts._forward_hooks.clear()  # what they keep would leave the graph as outputs
        self.experts._forward_pre_hooks.clear()
        self.experts.config._experts_implementation = implementation

    def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        result: Tensor = self.experts(torch.tanh(self.base(x)), ids, gates)
        return result


def compiled(layer: Layer, **options: Any) -> Compiled:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, HIDDEN, generator=generator).to(BF16).requires_grad_()
    gates = torch.rand(32, 2, generator=generator).to(BF16).requires_grad_()
    ids = torch.rand(32, EXPERTS, generator=generator).argsort(-1)[:, :2]
    given = {"qfuse.compute": "fp8", "qfuse.thresholds": {"quantize_products.min_rows": 1}}
    return compile_step(
        layer, x, ids, gates, module=layer, options={**given, **options}, context=no_codegen()
    )


@pytest.mark.parametrize("compute", ["fp8", "int8"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "16 bits"])
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_they_are_refused(implementation: str, packed: bool, compute: str) -> None:
    """Each of both products, forward and for the gradient of its input; what is beside is not."""
    outcome = compiled(Layer(implementation, packed=packed), **{"qfuse.compute": compute})
    assert outcome.reasons["quantize_products"] == {REASON: 4}
    assert outcome.report.in_eight_bits() == (2, 6)
    assert f"2 of 6 products with frozen weights in {compute}" in outcome.report.summary()
    refused = {s.module for s in outcome.report.sites if s.rejected == REASON}
    stacks = {"experts.gate_up_proj", "experts.down_proj"}
    assert refused == (stacks if packed else {"experts"})
    assert outcome.ops["qfuse.scatter2scatter"] == (
        4 if packed or "batched" in implementation else 0
    )


def test_by_default_nothing_is_said() -> None:
    outcome = compiled(Layer("batched_mm", packed=True), **{"qfuse.compute": "bf16"})
    assert "quantize_products" not in {site.pass_name for site in outcome.report.sites}


def test_experts_that_train_are_none() -> None:
    outcome = compiled(Layer("grouped_mm", packed=False, trains=True))
    assert outcome.report.in_eight_bits() == (2, 2)


def test_a_pattern_may_exclude_them() -> None:
    outcome = compiled(Layer("batched_mm", packed=True), **{"qfuse.compute.exclude": "experts.*"})
    assert outcome.reasons["quantize_products"] == {"qfuse.compute.exclude has 'experts.*'": 4}


def test_strict_numerics_is_the_reason_where_it_is_asked_for() -> None:
    outcome = compiled(Layer("batched_mm", packed=True), **{"qfuse.numerics": "strict"})
    assert outcome.reasons["quantize_products"] == {STRICT: 6}
