"""The report of a process counts layers over all graphs, and says when nothing was fused."""

from __future__ import annotations

import gc
import logging
import re
from typing import Any

import pytest
import torch
from torch import nn

import inductor_q
from inductor_q import testing
from inductor_q.process import UNSEEN, ProcessReport
from inductor_q.verdict import Verdict
from tests.support.compiling import no_codegen
from tests.support.packed import Gptq

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")


class Two(nn.Module):
    """Two layers with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = testing.lora_linear(64, 64, r=4, seed=1)
        self.second = testing.lora_linear(64, 64, r=4, seed=2)

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        y: torch.Tensor = self.first(x)
        if both:
            torch._dynamo.graph_break()
            y = self.second(y)
        return y


def reset() -> None:
    torch.compiler.reset()
    # Torch resets backends that it has looked up, not one that `observe` put in their place.
    inductor_q.backend.qfuse.reset()  # type: ignore[attr-defined]


def run(model: nn.Module, **kwargs: bool) -> None:
    reset()
    with no_codegen():
        compiled = torch.compile(model, backend=inductor_q.backend.qfuse)
        x = torch.ones(4, 64, dtype=torch.bfloat16, requires_grad=True)
        compiled(x, **kwargs).sum().backward()


def test_layers_are_counted_over_all_graphs() -> None:
    model = Two()
    run(model)
    found = inductor_q.report(model)
    assert (found.graphs, found.breaks, found.fused, len(found.layers)) == (2, 1, 2, 2)
    assert "2 of 2 quantized layers fused; 2 graphs, 1 break; run `qfuse exp" in found.summary()
    last = inductor_q.last_report()
    assert last is not None and last.summary().startswith("qfuse: graph 1/0, training; preset")


def test_breaks_of_another_backend_count_until_counted_anew() -> None:
    torch.compiler.reset()
    torch.compile(Two(), backend="eager")(torch.ones(4, 64, dtype=torch.bfloat16))
    torch.compiler.reset()  # of which torch tells "eager" alone
    assert inductor_q.backend.graph_breaks() == 1
    inductor_q.backend.count_anew()
    assert inductor_q.backend.graph_breaks() == 0


def test_a_model_is_not_credited_with_the_graphs_of_another() -> None:
    """Whose layers have the same paths. Once a model is gone, nobody can tell which graphs were
    for it; nor of parameters that are in no module, as those that FSDP gathers."""
    model, other = Two(), Two()
    run(model)
    assert inductor_q.report(other).fused == inductor_q.report(other).graphs == 0
    assert inductor_q.report(model).fused == inductor_q.report(nn.Sequential(model)).fused == 2
    assert inductor_q.report(model.first).fused == 1
    del model
    gc.collect()
    assert inductor_q.report(other).graphs == 2


def test_a_process_counts_no_layers_of_a_model_that_nobody_compiled() -> None:
    """Not even where their paths end as those of another model that is compiled."""
    model, other = Two(), nn.Sequential(Two())
    run(model)
    found = inductor_q.report()
    assert set(found.layers) == set(inductor_q.report(model).layers)
    assert found.fused == 2
    del model
    gc.collect()
    assert inductor_q.report(other).fused == 2, "nobody can tell which model it was"


def test_a_compiled_model_that_runs_the_graph_of_another_is_counted() -> None:
    """Dynamo compiles nothing for the second model of a class: its parameters are inputs too."""
    model, other = Two(), nn.Sequential(Two())
    reset()
    x = torch.ones(4, 64, dtype=torch.bfloat16, requires_grad=True)
    with no_codegen():
        for each in (model, other[0]):
            each.compile(backend=inductor_q.backend.qfuse)
            each(x).sum().backward()
    found = inductor_q.report()
    assert found.graphs == 2
    paths = {*inductor_q.report(model).layers, *inductor_q.report(other).layers}
    assert len(paths) == 4 and paths <= found.layers.keys()
    assert {found.layers[path].status for path in paths} == {"fused"}


def test_a_model_that_is_gone_is_not_counted() -> None:
    """As in a notebook, where a run that was repaired comes after one that fused nothing, in whose
    model layers have the same paths. Where nobody else can have a graph, it still counts."""

    def train(dtype: torch.dtype) -> Two:
        model = Two()
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.data = parameter.data.to(dtype)
        inductor_q.compile(model, regions="model")
        model(torch.ones(4, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
        return model

    torch.compiler.reset()
    inductor_q.backend.qfuse.reset()  # type: ignore[attr-defined]
    with no_codegen():
        first = train(torch.float32)
        found = inductor_q.report(first)
        breaks = found.breaks
        assert (found.fused, found.graphs) == (0, 2) and breaks
        second = train(torch.bfloat16)
        del first
        gc.collect()
        for part in (second, nn.Sequential(second)):
            found = inductor_q.report(part)
            assert (found.fused, found.graphs, found.breaks) == (2, 2, breaks)
        assert inductor_q.report(second.first).fused == 1
        other = Two()
        assert inductor_q.report(other).graphs == 2
        torch.compiler.reset()
        assert inductor_q.report(second).breaks == 0


def test_another_wrapper_of_the_same_base_has_its_graphs() -> None:
    """As where a cell of a notebook wraps the model once more, and its layers run the graph that
    was compiled for them."""
    from peft import LoraConfig, get_peft_model

    base = testing.qlora_model(testing.tiny_qwen3_config(num_hidden_layers=2)).unload()
    torch.compiler.reset()
    inductor_q.backend.qfuse.reset()  # type: ignore[attr-defined]
    ids = torch.arange(16).reshape(1, 16)
    counts = []
    for _ in range(2):
        model: Any = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))
        with no_codegen(), torch.autocast("cpu", torch.bfloat16):
            inductor_q.compile(model, regions="layers")
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found = inductor_q.report(model)
        counts.append((len(found.layers), found.graphs > 0, found.fused > 0))
        base = model.unload()
        del model
        gc.collect()
    assert counts == [(14, True, True)] * 2


def test_a_graph_that_was_traced_anew_counts_once() -> None:
    """As with dynamic=True a number is, which is a constant the second time."""
    model = testing.lora_linear(64, 64, r=4)

    def normed(x: torch.Tensor, eps: float) -> torch.Tensor:
        return nn.functional.layer_norm(model(x), (64,), eps=eps)

    torch.compiler.reset()
    inductor_q.backend.qfuse.reset()  # type: ignore[attr-defined]
    with no_codegen():
        compiled = torch.compile(normed, backend=inductor_q.backend.qfuse, dynamic=True)
        compiled(torch.ones(4, 64, dtype=torch.bfloat16, requires_grad=True), 1e-5)
    assert inductor_q.report(model).graphs == 1


def test_a_layer_that_no_graph_reads_counts() -> None:
    model = Two()
    run(model, both=False)
    found = inductor_q.report(model)
    assert (found.fused, found.breaks) == (1, 0) and not found.is_clean
    assert found.layers["second.proj"].reason == UNSEEN
    assert f"1 of 2 quantized layers fused; 1 graph, 0 breaks; 1 not fused: {UNSEEN}" in (
        found.summary()
    )
    assert len(inductor_q.report().layers) >= 2  # other tests' models may live


def test_layers_that_are_not_fused_for_other_reasons_are_counted() -> None:
    layers = {name: Verdict("rejected", f"too {name[0]}") for name in ("few", "f", "many")}
    said = ProcessReport(layers=layers).summary()
    assert "2 not fused and 1 for other reasons: too f; run" in said


def test_what_is_traced_anew_counts_once() -> None:
    """Under dynamic=True a number of Python is a symbol at first; Inductor finds in the middle of a
    compile that an op needs its value, and Dynamo traces the frame once more."""
    model = testing.lora_linear(64, 64, r=4)

    def normed(x: torch.Tensor, eps: float) -> torch.Tensor:
        return nn.functional.layer_norm(model(x), (64,), eps=eps)

    torch.compiler.reset()
    with no_codegen():
        compiled = torch.compile(normed, backend=inductor_q.backend.qfuse, dynamic=True)
        x = torch.ones(4, 64, dtype=torch.bfloat16, requires_grad=True)
        compiled(x, 1e-5).sum().backward()
    assert inductor_q.report().graphs == 1


def test_what_the_recompile_limit_leaves_in_eager_mode_is_said() -> None:
    torch.compiler.reset()
    layers = nn.Sequential(*(testing.lora_linear(64, 64, r=r) for r in (2, 4, 8)))
    for layer in layers:
        layer.compile(backend=inductor_q.backend.qfuse)
    with no_codegen(), torch._dynamo.config.patch(recompile_limit=2):
        layers(torch.ones(4, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    found = inductor_q.report(layers)
    assert (found.graphs, found.at_limit) == (2, 1) and not found.is_clean
    assert "1 function at the recompile limit, partly in eager mode; run" in found.summary()
    torch.compiler.reset()
    assert inductor_q.report(layers).at_limit == 0


def test_a_reset_forgets() -> None:
    model = Two()
    run(model)
    torch.compiler.reset()
    found = inductor_q.report(model)
    assert (found.graphs, found.breaks, found.fused, len(found.layers)) == (0, 0, 0, 2)


def test_a_graph_in_which_nothing_is_fused_warns(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "inductor_q")
    model = Two()
    run(model, both=False)
    assert "0 of 1" not in caplog.text
    model.first = Gptq()
    run(model, both=False)
    assert caplog.text.count("0 of 1 quantized layer fused") == 1
    assert "run `qfuse explain`" in caplog.text


class Outside(nn.Module):
    """A quantized layer that runs between graphs, as where FSDP2 rebuilds its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = testing.lora_linear(64, 64, r=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between: Any = torch._dynamo.disable(self.layer)
        x = torch.tanh(between(x)) * 2
        x = torch.tanh(between(x)) * 3
        return torch.tanh(between(x)) * 4


@pytest.mark.parametrize("ours", [False, True])
def test_breaks_around_quantized_layers_warn(caplog: pytest.LogCaptureFixture, ours: bool) -> None:
    """With the advice to call what prevents breaks, unless that was called."""
    caplog.set_level(logging.WARNING, "inductor_q")
    model = Outside()
    if ours:
        reset()
        with no_codegen():
            inductor_q.compile(model)(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
    else:
        run(model)
    found = re.search(r"layers fused so far; 3 graphs, (\d) breaks: `qfuse explain`", caplog.text)
    assert found is not None
    assert int(found[1]) == inductor_q.report().breaks
    assert ("inductor_q.compile(model) prevents most breaks" in caplog.text) == (not ours)
