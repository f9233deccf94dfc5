"""Gradient checkpointing in one graph, by each way in which people enable it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from inductor_q import testing
from inductor_q.diagnostics import observe
from inductor_q.integrations import prepare_checkpointing
from tests.support.compiling import gradients

for extra in ("bitsandbytes", "transformers"):
    pytest.importorskip(extra)
peft = pytest.importorskip("peft")


def qlora() -> Any:
    config = testing.tiny_qwen3_config(num_hidden_layers=1)
    return testing.qlora_model(config, adapter_dtype=torch.bfloat16, randomize_adapters=True)


def enable(reentrant: bool | None) -> Callable[[Any], None]:
    kwargs = None if reentrant is None else {"use_reentrant": reentrant}
    return lambda model: model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)


def kbit(model: Any) -> None:
    """PEFT's preparation, which comes before the adapters: they stay trainable here."""
    trained = testing.adapter_parameters(model)
    peft.prepare_model_for_kbit_training(model.get_base_model())
    for parameter in trained:
        parameter.requires_grad_(True)


def trl(model: Any) -> None:
    """What SFTTrainer and then Trainer do."""
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()


WAYS = {
    "default": enable(None),
    "not reentrant": enable(False),
    "reentrant": enable(True),
    "kbit": kbit,
    "trl": trl,
}


def step(model: Any, run: Callable[..., Any]) -> torch.Tensor:
    """Return the gradients of one step as one vector."""
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(3))
    run(input_ids=ids, labels=ids).loss.backward()
    found = gradients({}, model)
    assert len(found) == 14  # A and B of seven projections
    return torch.cat([gradient.flatten() for gradient in found.values()])


def compiled_step(model: Any) -> tuple[torch.Tensor, testing.CompileTrace]:
    torch._dynamo.reset()
    with testing.CompileTrace() as trace:
        found = step(model, torch.compile(model, backend="eager"))
    return found, trace


@pytest.mark.parametrize("way", WAYS)
def test_one_graph_however_it_is_enabled(way: str) -> None:
    """Enabled before the call, and again after it, as a Trainer does."""
    model = qlora()
    WAYS[way](model)
    eager = step(model, model)
    prepare_checkpointing(model)
    prepare_checkpointing(model)  # once more changes nothing
    WAYS[way](model)
    compiled, trace = compiled_step(model)
    assert (trace.graphs, trace.breaks) == (1, [])
    # Not bitwise: transformers writes the mask out while Dynamo traces.
    assert testing.relative_error(compiled, eager) < 0.02


def test_without_it_the_graph_breaks() -> None:
    """Else this function is no longer needed. What explains the break names it."""
    model = qlora()
    trl(model)
    torch._dynamo.reset()
    with observe() as observation:
        step(model, torch.compile(model, backend="eager"))
    assert any("QfuseCallback" in b.fix for b in observation.explanation().breaks)


def test_eager_mode_keeps_its_gradients() -> None:
    """Where the hook is gone, reentrant checkpointing would give none."""
    model = qlora()
    expected = step(model, model)
    prepare_checkpointing(model)
    enable(True)(model)
    assert torch.equal(step(model, model), expected)


def test_a_copy_is_prepared_itself() -> None:
    """The wrapped methods belong to the copy, not to the model that it was copied from."""
    config = testing.tiny_llama_config(num_hidden_layers=1)
    model = pytest.importorskip("transformers").AutoModelForCausalLM.from_config(config)
    prepare_checkpointing(model)
    other = copy.deepcopy(model)
    other.gradient_checkpointing_enable()
    assert not other.get_input_embeddings()._forward_hooks
    assert other.is_gradient_checkpointing and not model.is_gradient_checkpointing
    other.disable_input_require_grads()  # transformers still finds its handles
    other.gradient_checkpointing_disable()
    assert not other.is_gradient_checkpointing


def test_only_the_hook_is_removed() -> None:
    """PEFT registers its own on models that are not transformers'."""

    def make_inputs_require_grad(module: Any, args: Any, output: torch.Tensor) -> None:
        output.requires_grad_(True)

    def another(module: Any, args: Any, output: torch.Tensor) -> None: ...

    embedding = nn.Embedding(4, 4)
    embedding.register_forward_hook(make_inputs_require_grad)
    embedding.register_forward_hook(another)
    prepare_checkpointing(nn.Sequential(embedding))
    assert list(embedding._forward_hooks.values()) == [another]
