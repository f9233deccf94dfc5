"""What an observed run tells of layers, of attention and of what is saved for backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from inductor_q import testing
from inductor_q.backend import qfuse
from inductor_q.capture.live import Quantized
from inductor_q.diagnostics import coverage
from inductor_q.diagnostics.explanation import Explanation
from inductor_q.diagnostics.render import words
from inductor_q.graph_report import Report, SiteRecord
from inductor_q.integrations import prepare_checkpointing
from inductor_q.passes.causal_attention import CausalAttention
from tests.support.compiling import no_codegen, skip_unless_regions_chain
from tests.support.observing import observed

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(32, 64, dtype=torch.bfloat16)
        self.seen = testing.quantized_linear(weight)
        self.unseen = testing.quantized_linear(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.seen(x)
        return y


@pytest.mark.parametrize("backend", ["inductor", "qfuse"])
def test_coverage_and_saved_tensors(backend: str) -> None:
    model = Model()
    x = torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True)
    name = testing.qfuse_backend() if backend == "qfuse" else backend

    def call() -> None:
        torch.compile(model, backend=name)(x).sum().backward()

    run = observed(call)
    layers = {layer.module: layer for layer in run.layers if layer.module in ("seen", "unseen")}
    seen, unseen = layers["seen"], layers["unseen"]
    assert (seen.status, seen.format, seen.shape) == ("fused", "nf4", (32, 64))
    assert seen.would == (backend == "inductor")
    assert "canonicalize" in [step.pass_name for step in seen.steps]
    assert unseen.status == "unseen"
    assert [c.backend for c in run.compiles] == [backend]
    assert run.warnings == ()
    assert "qfuse.numerics" in run.options


def graphs(gm: Any, example_inputs: Any) -> Any:
    """Inductor up to its last graphs, which run as they are: no code is generated."""
    from functorch.compile import make_boxed_func
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    def run(gm: Any, example_inputs: Any, **_: Any) -> Any:
        return make_boxed_func(gm.forward)

    with config.patch(enable_autograd_cache=False):
        return compile_fx(gm, example_inputs, inner_compile=run)


def test_what_cannot_be_told_of_attention_hides_no_quantized_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such mask")

    monkeypatch.setattr(CausalAttention, "match", fail)
    model, x = Model(), torch.randn(8, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        run = observed(lambda: torch.compile(model, backend="inductor")(x))
    (seen,) = (layer for layer in run.layers if layer.module == "seen")
    assert (seen.status, seen.would) == ("fused", True)
    (told,) = run.warnings
    assert "no such mask" in told


ALWAYS = {
    "extend_k.min_rows": 1,
    "fuse_dropout.min_rows": 1,
    "causal_attention.min_positions": 1,
}


def test_the_recipe_of_trainers() -> None:
    """Mask, dropout, checkpointing and loss of a model under autocast: what is done, or why not."""
    for extra in ("bitsandbytes", "peft", "transformers"):
        pytest.importorskip(extra)
    config = testing.tiny_llama_config(num_hidden_layers=1)
    model = testing.qlora_model(config, dropout=0.05, randomize_adapters=True)
    prepare_checkpointing(model)
    model.gradient_checkpointing_enable()
    ids = torch.randint(0, 256, (2, 32))
    mask = torch.ones_like(ids)
    mask[0, 20:] = 0

    def run(backend: Any, **options: Any) -> Explanation:
        torch._dynamo.reset()
        compiled: Any = torch.compile(model, backend=backend, options=options or None)

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                found = compiled(input_ids=ids, attention_mask=mask, labels=ids)
            found.loss.backward()

        return observed(step)

    def told(found: Explanation) -> dict[str, list[tuple[str, str]]]:
        return {
            kind: [(layer.status, layer.reason) for layer in getattr(found, kind)]
            for kind in ("attention", "loss", "checkpointing")
        }

    with no_codegen():
        thresholds = {**ALWAYS, "keep_checkpointed.min_ratio": 1}
        done = run(qfuse, **{"qfuse.thresholds": thresholds, "qfuse.loss": "chunked"})
    assert not done.breaks
    again = (
        "attention of 32 positions is computed again, fewer than "
        "keep_checkpointed.min_positions=1048576"
    )
    assert told(done) == {
        "attention": [("fused", "")],
        "loss": [("fused", "")],
        # The projections of q, k and v together, of o, gate and up, and down; the layer's result.
        "checkpointing": [("fused", ""), ("canonical", again), *[("fused", "")] * 4],
    }
    [loss] = done.loss
    provider = "qfuse.linear_cross_entropy, logits on demand"
    assert (loss.module, loss.steps[0].provider) == ("base_model.model.lm_head", provider)
    assert {layer.status for layer in done.layers} == {"fused"}
    passes = [{s.pass_name for s in layer.steps if not s.rejected} for layer in done.layers]
    assert all("fuse_dropout" in found for found in passes)

    would = run(graphs)  # by a CPU's own preset
    assert {layer.status for layer in would.layers} == {"fused"}
    refused = {name: reason for name, reason, _ in words.refusals(would)}
    least = "of the preset"
    assert refused["fuse_dropout"].endswith(least)
    assert refused["extend_k"].startswith("a factor that cannot move (a dropout mask")
    titles = [title for _, title, _ in words.beside(would)]
    assert titles[:2] == [
        "Attention: 0 of 1 mask would be left out",
        "Loss: 0 of 1 head would be computed in chunks",
    ]
    assert "qfuse.loss='chunked' has no such limit" in would.loss[0].reason


def test_what_became_of_attention_is_no_quantized_layer() -> None:
    attention = SiteRecord("causal_attention", "sdpa", module="0.self_attn", provider="sdpa")
    refused = replace(attention, provider="", rejected="it may hold padding", by_choice=True)
    linear = SiteRecord("canonicalize", "gemm_4bit", module="0.self_attn.q_proj")
    reports = [(Report(sites=[attention, linear]), True), (Report(sites=[refused]), True)]
    [layer] = coverage.layers(reports, (), {})
    assert layer.module == "0.self_attn.q_proj"
    [one] = coverage.beside("attention", reports)
    assert (one.module, one.kind, one.would) == ("0.self_attn", "attention", True)
    assert (one.status, one.reason) == ("canonical", "it may hold padding"), "the worst compile"
    assert [s.provider for s in one.steps] == ["sdpa", ""]


class Attention(nn.Module):
    """A mask that is causal, or one that hides one more key."""

    def __init__(self, hidden: int = 0) -> None:
        super().__init__()
        self.linear = testing.quantized_linear(torch.randn(64, 64, dtype=torch.bfloat16))
        self.hidden = hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.shape[1])
        mask = at <= at[:, None]
        if self.hidden:
            mask = mask & (at != self.hidden)
        x = self.linear(x)[:, None]
        attend = nn.functional.scaled_dot_product_attention
        return attend(x, x, x, attn_mask=mask.expand(x.shape[0], 1, -1, -1))


@pytest.mark.parametrize(
    ("hidden", "status", "reason"),
    [
        (0, "fused", ""),
        (9, "canonical", "the mask is computed with the number 9, as a window is"),
    ],
)
def test_attention_that_another_backend_compiles(hidden: int, status: str, reason: str) -> None:
    """What qfuse would do is told; the graph and its guards are as without a look at them."""
    module = Attention(hidden)
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16)

    def seen(dry_run: bool) -> tuple[Explanation, str, list[str]]:
        kept: list[tuple[str, list[str]]] = []

        def keep(gm: Any, example_inputs: Any) -> Any:
            [size, *_] = (s for s in example_inputs if isinstance(s, torch.SymInt))
            kept.append((str(gm.graph), [str(g.expr) for g in size.node.shape_env.guards]))
            return graphs(gm, example_inputs)

        torch._dynamo.reset()
        with torch.no_grad():
            run = observed(
                lambda: torch.compile(module, backend=keep, dynamic=True)(x), dry_run=dry_run
            )
        [(graph, guards)] = kept
        return run, graph, guards

    looked, *left = seen(True)
    [one] = looked.attention
    assert (one.status, one.reason, one.would, one.shape) == (status, reason, True, (-1, 1, -1, 64))
    unlooked, *untouched = seen(False)
    assert left == untouched
    assert not unlooked.attention


def test_a_layer_that_is_itself_compiled() -> None:
    """It has no path; its parameter has a name."""
    layer: nn.Module = testing.quantized_linear(torch.randn(32, 64, dtype=torch.bfloat16))
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    run = observed(lambda: torch.compile(layer, backend=graphs)(x))
    [found] = [one for one in run.layers if one.status == "fused"]
    assert (found.module, found.format) == ("weight", "nf4")


def test_saved_bytes_are_what_autograd_holds() -> None:
    other = testing.qlora_model(testing.tiny_llama_config(num_hidden_layers=2))  # the same paths
    config = testing.tiny_llama_config(num_hidden_layers=1)
    model = testing.qlora_model(config, adapter_dtype=torch.bfloat16)
    ids = torch.randint(0, config.vocab_size, (2, 32))
    compiled: Any = torch.compile(model, backend=graphs)
    run = observed(lambda: compiled(input_ids=ids, labels=ids).loss.backward())
    held = testing.count_saved_bytes(lambda: compiled(input_ids=ids, labels=ids).loss, model)
    assert run.saved_bytes == held.total > 0
    assert sum(item.count for item in run.saved) == len(held.tensors)
    assert len(run.layers) == len(testing.PROJECTIONS), other
    assert all(layer.status == "fused" and layer.would for layer in run.layers)


class Region(nn.Module):
    """Torch compiles it once, however often it stands in a model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = testing.lora_linear(64, 64, adapter_dtype=torch.bfloat16)

    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


def test_layers_that_share_the_graph_of_a_nested_region() -> None:
    """Each has its outcome, and the ops inside are what keeps memory for backward."""
    model = nn.Sequential(*(Region() for _ in range(3)))
    x = torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True)
    skip_unless_regions_chain(model, x)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend=graphs)
    run = observed(lambda: compiled(x).sum().backward())
    layers = [one for one in run.layers if one.module.endswith("layer.proj")]
    assert [one.module for one in layers] == [f"{n}.layer.proj" for n in range(3)]
    assert all((one.status, one.would) == ("fused", True) for one in layers)
    for one in layers:
        assert {step.pass_name for step in one.steps} >= {"canonicalize", "fold_lora"}
    saved = {item.op: item.count for item in run.saved}
    assert (saved["aten.tanh"], saved["aten.mm"]) == (3, 3)
    assert "invoke_subgraph" not in saved
    held = testing.count_saved_bytes(lambda: compiled(x), model)
    inputs = x.numel() * x.element_size()
    assert run.saved_bytes == held.total - inputs > 0


@pytest.mark.parametrize("order", [1, -1])
def test_a_model_whose_paths_end_as_those_of_the_compiled_one_is_not_told_of(order: int) -> None:
    """As the base of a model that PEFT had wrapped, which the garbage collector has not freed."""
    names = ("base_model.model.model.layers.0.proj", "model.layers.0.proj", "layers.1.proj")
    live = [Quantized(name, "linear", "nf4", tree=tree) for tree, name in enumerate(names)]
    found = coverage.layers([], live[::order], {names[0]: "no pass ran"}, all_trees=False)
    assert [(one.module, one.reason) for one in found] == [(names[0], "no pass ran")]


def test_backends_that_cannot_be_looked_into() -> None:
    model = Model()
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    run = observed(lambda: torch.compile(model, backend="aot_eager")(x))
    seen = next(layer for layer in run.layers if layer.module == "seen")
    assert seen.status == "rejected"
    assert "aot_eager" in seen.reason
    assert "aot_eager" in run.warnings[0]
