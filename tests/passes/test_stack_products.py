"""Stacks of weights under `qfuse.compute`: packed experts are in FP8, others not, with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from inductor_q import memory, ops
from inductor_q.experts.modules import expert_layers
from inductor_q.kernels import PROVIDERS, scatter2scatter_reference
from inductor_q.kernels.expert_calls import ARGUMENTS, IN_FP8, Scatter2Scatter
from inductor_q.kernels.scatter2scatter_fp8 import Fp8
from inductor_q.liveness import Liveness, simulate, workspace
from inductor_q.passes.emit_eight_bits import ROW_AMAX
from inductor_q.passes.experts_in_fp8 import DENSE_EXPERTS
from inductor_q.passes.fold_lora import STRICT
from inductor_q.passes.fuse_scatter2scatter import SCATTER2SCATTER
from inductor_q.passes.quantize_products import WRITTEN
from inductor_q.passes.stack_products import BATCHED, STACKED
from inductor_q.passes.stack_products import EXPERTS as GROUPED
from tests.support.compiling import Compiled, compile_step, no_codegen, partition
from tests.support.moe_models import EXPERTS, HIDDEN, INTERMEDIATE, model
from tests.support.thresholds import ANY_EXPERT, ANY_PRODUCT

parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")

BF16 = torch.bfloat16
IN_INT8 = "experts stay in 16 bits: no kernel here multiplies groups of rows in int8"


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


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, HIDDEN, generator=generator).to(BF16).requires_grad_()
    gates = torch.rand(32, 2, generator=generator).to(BF16).requires_grad_()
    return x, torch.rand(32, EXPERTS, generator=generator).argsort(-1)[:, :2], gates


def compiled(layer: Layer, **options: Any) -> Compiled:
    """Compile one step with options, of which `dynamic` is torch.compile's."""
    dynamic = options.pop("dynamic", None)
    x, ids, gates = inputs()
    given = {
        "qfuse.compute": "fp8",
        "qfuse.thresholds": ANY_EXPERT,
    }
    return compile_step(
        layer,
        x,
        ids,
        gates,
        module=layer,
        options={**given, **options},
        context=no_codegen(),
        dynamic=dynamic,
    )


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_packed_experts_are_in_fp8(implementation: str) -> None:
    """Both products, forward and for the gradient, which reads the scales of forward."""
    layer = Layer(implementation, packed=True)
    in_16_bits = compiled(layer, **{"qfuse.compute": "bf16"})
    outcome = compiled(layer)
    assert outcome.report.in_eight_bits() == (6, 6)
    assert "quantize_products" not in outcome.reasons
    (joint,) = outcome.joint
    scale = ARGUMENTS.index("row_scale")
    products = joint.find_nodes(op="call_function", target=SCATTER2SCATTER)
    assert len(products) == 4 and all(node.args[scale] is not None for node in products)
    for name, exact in in_16_bits.gradients.items():
        found = outcome.gradients[name]
        assert 1e-3 < float((found - exact).norm() / exact.norm()) < 0.08, name


def test_backward_reads_the_scales_of_forward() -> None:
    layer = Layer("grouped_mm", packed=True)
    options = {"qfuse.compute": "fp8", "qfuse.thresholds": ANY_EXPERT}
    graphs = partition(lambda model: model(*inputs()).sum().backward(), layer, options)
    counts = [len(g.find_nodes(op="call_function", target=ROW_AMAX)) for g in graphs]
    assert counts == [2, 0]


def test_dynamic_shapes() -> None:
    layer = Layer("grouped_mm", packed=True)
    outcome = compiled(layer, dynamic=True)
    assert outcome.report.in_eight_bits() == (6, 6)


def test_the_report_says_who_multiplies() -> None:
    outcome = compiled(Layer("grouped_mm", packed=True))
    served = {(s.op, s.provider) for s in outcome.report.sites if s.op == IN_FP8}
    assert served == {(IN_FP8, "reference")}


def test_a_provider_that_is_asked_for_multiplies_in_16_bits() -> None:
    options = {"qfuse.kernels": {"scatter2scatter": "dequantize"}}
    outcome = compiled(Layer("grouped_mm", packed=True), **options)
    reason = "qfuse.kernels has 'dequantize' for scatter2scatter, which multiplies in 16 bits"
    assert outcome.reasons["quantize_products"] == {reason: 4}


class Writes(Layer):
    """It scales the absmax of its first stack in forward, behind the products."""

    def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        result = super().forward(x, ids, gates)
        stack = self.experts.parametrizations.gate_up_proj[0]
        stack.quant_state.absmax.add_(0)
        return result


def test_scales_that_forward_writes_to() -> None:
    outcome = compiled(Writes("grouped_mm", packed=True))
    assert WRITTEN in outcome.reasons["quantize_products"]


class AllInE4m3(Fp8):
    """Takes calls on a CPU, and says that it allocates what the kernel for GPUs does."""

    def missing(self) -> str:
        return ""

    def refuses(self, call: Scatter2Scatter) -> str:
        return ""

    def run(self, call: Scatter2Scatter) -> tuple[Tensor, Tensor]:
        return scatter2scatter_reference.KERNEL.run(call)


def test_a_budget_counts_experts_that_are_decoded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """In both directions: all of them in e4m3, and the rows of their input."""
    monkeypatch.setitem(PROVIDERS, IN_FP8, {"cpu": (AllInE4m3(), *PROVIDERS[IN_FP8]["cpu"])})
    layer, simulated = Layer("grouped_mm", packed=True), list[tuple[int, ...]]()

    def spy(graph: fx.Graph, *args: Any) -> Liveness:
        found = simulate(graph, *args)
        products = graph.find_nodes(op="call_function", target=SCATTER2SCATTER)
        simulated.append(tuple(workspace(node) for node in products))
        assert found.peak >= max(simulated[-1])
        return found

    monkeypatch.setattr(memory, "simulate", spy)
    options = {"qfuse.compute": "fp8", "qfuse.thresholds": ANY_EXPERT, "qfuse.memory": "1GB"}
    partition(lambda model: model(*inputs()).sum().backward(), layer, options)
    up, down = EXPERTS * 2 * INTERMEDIATE * HIDDEN, EXPERTS * HIDDEN * INTERMEDIATE
    rows, by_token = 32 * 2, 32 * HIDDEN * 2  # half of what is summed up, as the sum comes late
    forward = up + rows * (HIDDEN + 4), down + rows * (INTERMEDIATE + 4) + by_token
    backward = down + rows * (HIDDEN + 4), up + rows * (2 * INTERMEDIATE + 4) + by_token
    assert simulated[:2] == [forward, backward]


def test_few_rows_of_an_expert_stay_in_16_bits() -> None:
    outcome = compiled(Layer("grouped_mm", packed=True), **{"qfuse.thresholds": ANY_PRODUCT})
    assert outcome.report.in_eight_bits() == (2, 6)
    reasons = outcome.reasons["quantize_products"]
    assert sum(reasons.values()) == 4
    assert all("quantize_products.min_expert_elements=4194304" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("packed", "compute"),
    [(True, "int8"), (False, "int8"), (False, "fp8")],
    ids=["packed int8", "16 bits int8", "16 bits fp8"],
)
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_the_others_are_refused(implementation: str, packed: bool, compute: str) -> None:
    """Each of both products, forward and for the gradient of its input; what is beside is not."""
    outcome = compiled(Layer(implementation, packed=packed), **{"qfuse.compute": compute})
    is_ours = packed or implementation == "batched_mm"
    reason = IN_INT8 if is_ours and compute == "int8" else DENSE_EXPERTS if is_ours else GROUPED
    assert outcome.reasons["quantize_products"] == {reason: 4}
    assert outcome.report.in_eight_bits() == (2, 6)
    assert f"2 of 6 products with frozen weights in {compute}" in outcome.report.summary()
    refused = {s.module for s in outcome.report.sites if s.rejected == reason}
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


class Stack(nn.Module):
    """A product with a stack of four matrices [64, 32], in 16 bits or packed, or with one matrix
    that is seen as such a stack."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor], kind: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.product, self.kind = product, kind
        shape = (4 * 64, 32) if kind == "matrix" else (4, 64, 32)
        weight = torch.randn(shape, generator=generator).to(BF16)
        self.stack = nn.Parameter(weight, requires_grad=kind == "trains")
        self.codes = nn.Parameter((weight * 40).to(torch.int8), requires_grad=False)
        self.register_buffer("scale", torch.rand(4 * 64, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        stack: Tensor = self.stack
        if self.kind == "packed":
            operands: Any = [self.codes, self.scale]
            stack = ops.dequantize(operands, "int8_absmax", (4, 64, 32), BF16)
        return torch.tanh(self.product(torch.tanh(x), stack.view(4, 64, 32)))


def refusals(product: Callable[[Tensor, Tensor], Tensor], kind: str) -> dict[str, int]:
    layer = Stack(product, kind)
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).to(BF16).requires_grad_()
    options = {
        "qfuse.compute": "int8",
        "qfuse.thresholds": ANY_PRODUCT,
    }
    outcome = compile_step(layer, x, module=layer, options=options, context=no_codegen())
    found = outcome.reasons.get("quantize_products", {})
    assert outcome.report.in_eight_bits() == (0, sum(found.values()))
    assert {s.module for s in outcome.report.sites if s.rejected in found} <= {"stack", "codes"}
    return found


BATCHES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bmm": lambda x, w: torch.bmm(x.view(4, 16, 32), w.transpose(1, 2)),
    "baddbmm": lambda x, w: torch.baddbmm(
        x.view(4, 16, 32)[..., :1], x.view(4, 16, 32), w.transpose(1, 2)
    ),
    "heads": lambda x, w: torch.einsum("thd,hed->the", x.view(16, 4, 32), w),
    "a slice of heads": lambda x, w: torch.einsum("thd,hed->the", x.view(16, 4, 32), w[:, :16]),
    "a matrix": lambda x, w: torch.einsum("bti,oi->bto", x.view(2, 32, 32), w.view(256, 32)),
}


@pytest.mark.parametrize("kind", ["stack", "matrix", "packed"])
@pytest.mark.parametrize("product", BATCHES)
def test_a_batched_product_has_a_reason_of_its_own(product: str, kind: str) -> None:
    """Heads, as the matrices that MLA absorbs, are no experts."""
    assert refusals(BATCHES[product], kind) == {BATCHED: 2}


PARTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "a loop over experts": (
        lambda x, w: torch.cat([F.linear(h, w[i]) for i, h in enumerate(x.chunk(4))]),
        4,
    ),
    "a loop over a list": (
        lambda x, w: torch.cat([F.linear(h, e) for h, e in zip(x.chunk(4), w, strict=True)]),
        4,
    ),
    "one, with a bias": (lambda x, w: F.linear(x, w[1], x.new_ones(64)), 1),
    "a chunk": (lambda x, w: x @ w.chunk(4)[1].squeeze(0).t(), 1),
    "a slice": (lambda x, w: x @ w[1:2].squeeze((0,)).t(), 1),
    "all as one": (lambda x, w: F.linear(x, w.flatten(0, 1)), 1),
}


@pytest.mark.parametrize("kind", ["stack", "packed"])
@pytest.mark.parametrize("product", PARTS)
def test_a_part_of_a_stack_stays_in_16_bits(product: str, kind: str) -> None:
    multiply, count = PARTS[product]
    assert refusals(multiply, kind) == {STACKED: 2 * count}


@pytest.mark.parametrize("product", [BATCHES["bmm"], PARTS["a loop over experts"][0]])
def test_a_stack_that_trains_is_none(product: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert refusals(product, "trains") == {}
