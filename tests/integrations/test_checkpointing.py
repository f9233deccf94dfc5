"""Gradient checkpointing in one graph, by each way in which people enable it."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import inductor_q
from inductor_q import testing
from inductor_q.diagnostics import observe
from inductor_q.experts import quantize
from inductor_q.integrations import prepare_checkpointing
from inductor_q.log import warn_once
from tests.support.compiling import gradients, no_codegen

for extra in ("bitsandbytes", "transformers"):
    pytest.importorskip(extra)
peft = pytest.importorskip("peft")


def qlora() -> Any:
    config = testing.tiny_qwen3_config(num_hidden_layers=1)
    return testing.qlora_model(config, adapter_dtype=torch.bfloat16, randomize_adapters=True)


def enable(reentrant: bool | None) -> Callable[[Any], None]:
    kwargs = None if reentrant is None else {"use_reentrant": reentrant}
    return lambda model: model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)


def renamed(model: Any) -> None:
    """By the name that transformers 5 has for it."""
    enabling: Any = getattr(model, "activation_checkpointing_enable", None)
    if enabling is None:
        pytest.skip("this transformers has the old name alone")
    enabling()


def offloaded(model: Any) -> None:
    enabling: Any = getattr(model, "activation_checkpointing_enable", None)
    if enabling is None or "offload" not in inspect.signature(enabling).parameters:
        pytest.skip("this transformers offloads nothing")
    enabling(offload=True)


def kbit(model: Any, **settings: Any) -> None:
    """PEFT's preparation, which comes before the adapters: they stay trainable here."""
    trained = testing.adapter_parameters(model)
    peft.prepare_model_for_kbit_training(
        model.get_base_model(), gradient_checkpointing_kwargs=settings
    )
    for parameter in trained:
        parameter.requires_grad_(True)


def trl(model: Any) -> None:
    """What SFTTrainer and then Trainer do."""
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()


WAYS: dict[str, Callable[[Any], None]] = {
    "default": enable(None),
    "not reentrant": enable(False),
    "reentrant": enable(True),
    "renamed": renamed,
    "kbit": kbit,
    "kbit, reentrant": functools.partial(kbit, use_reentrant=True),
    "kbit, not reentrant": functools.partial(kbit, use_reentrant=False),
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


def test_layers_offload_in_eager_mode_alone(told: list[str]) -> None:
    warn_once.cache_clear()
    model = qlora()
    offloaded(model)
    prepare_checkpointing(model)
    prepare_checkpointing(model)
    assert len([line for line in told if "offload=True" in line]) == 1
    with no_pinning() as entered:
        expected = step(model, model)
        assert len(entered) == 1
        compiled, trace = compiled_step(model)
        assert len(entered) == 1
    assert (trace.graphs, trace.breaks) == (1, [])
    assert testing.relative_error(compiled, expected) < 0.02


@contextlib.contextmanager
def no_pinning() -> Iterator[list[object]]:
    """Offload without pinned memory, which a CPU has none of, and list each time."""
    entered: list[object] = []

    def save(**how: object) -> Any:
        entered.append(how)
        return torch.autograd.graph.save_on_cpu()

    with mock.patch("transformers.modeling_utils.save_on_cpu", save):
        yield entered


@pytest.mark.slow
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


def test_a_model_that_was_saved_whole_can_be_prepared_again() -> None:
    config = testing.tiny_llama_config(num_hidden_layers=1)
    model = pytest.importorskip("transformers").AutoModelForCausalLM.from_config(config)
    prepare_checkpointing(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    back = torch.load(file, weights_only=False)
    back.enable_input_require_grads()
    assert back.get_input_embeddings()._forward_hooks  # as transformers has it
    prepare_checkpointing(back)
    back.enable_input_require_grads()
    assert not back.get_input_embeddings()._forward_hooks


def test_what_is_removed_is_said(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    net = testing.qlora_model(testing.tiny_qwen3_config())
    net.enable_input_require_grads()
    net.gradient_checkpointing_enable({"use_reentrant": True})
    prepare_checkpointing(net)
    said = [record.getMessage() for record in caplog.records]
    assert any("removed the input hook of 'base_model.model.model.embed_tokens'" in s for s in said)
    assert any("3 modules checkpoint without reentrance now" in s for s in said)


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


def test_layers_of_llm_int8_are_in_the_graph_of_a_checkpointed_layer() -> None:
    """Their forward writes to the layer, which Dynamo lets no segment do unless it is told to."""
    config = testing.tiny_qwen3_config(num_hidden_layers=1)
    auto = pytest.importorskip("transformers").AutoModelForCausalLM
    base = inductor_q.quantize(auto.from_config(config, dtype=torch.bfloat16), "llm_int8")
    lora = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, lora, autocast_adapter_dtype=False).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    enable(False)(model)
    eager = step(model, model)
    inductor_q.compile(model)
    torch._dynamo.reset()
    with testing.CompileTrace() as trace:
        compiled = step(model, model)
    assert (trace.graphs, trace.breaks) == (1, [])
    assert testing.relative_error(compiled, eager) < 0.02


def with_packed_experts(layers: int = 1) -> Any:
    config = testing.tiny_qwen3_moe_config(num_hidden_layers=layers)
    auto = pytest.importorskip("transformers").AutoModelForCausalLM
    torch.manual_seed(2)  # with other weights a token may have another expert by rounding
    base = auto.from_config(config, dtype=torch.bfloat16)
    base.set_experts_implementation("grouped_mm")
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
    for layer in base.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            parametrize.replace_parameter_4bit(layer.mlp.experts, name)
    return testing.qlora_model(
        config, base=base, targets=testing.ATTENTION, randomize_adapters=True
    )


def moe_step(model: Any, run: Callable[..., Any]) -> torch.Tensor:
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(3))
    run(input_ids=ids, labels=ids).loss.backward()
    return torch.cat([gradient.flatten() for gradient in gradients({}, model).values()])


@pytest.mark.parametrize("checkpointed", [False, True])
def test_router_logits_are_in_the_graph(checkpointed: bool) -> None:
    """Of a mixture whose auxiliary loss is asked for, as TRL does, with that loss's gradients."""
    pytest.importorskip("transformers.utils.output_capturing")
    model = with_packed_experts(layers=2)
    model.config.output_router_logits = True
    found = {}
    for coefficient in (0.0, 5.0):
        model.get_base_model().router_aux_loss_coef = coefficient
        model.zero_grad()
        found[coefficient] = moe_step(model, model)
    assert testing.relative_error(found[0.0], found[5.0]) > 0.5
    if checkpointed:
        enable(False)(model)
    inductor_q.compile(model)
    torch._dynamo.reset()
    model.zero_grad()
    with testing.CompileTrace() as trace:
        compiled = moe_step(model, model)
    assert (trace.graphs, trace.breaks) == (1, [])
    assert testing.relative_error(compiled, found[5.0]) < 0.03


@pytest.mark.parametrize("checkpointed", [False, True])
def test_hidden_states_are_in_the_graph(checkpointed: bool) -> None:
    """Of a call that asks for them, with their gradients; a call that does not has a graph too."""
    pytest.importorskip("transformers.utils.output_capturing")
    config = testing.tiny_qwen3_config()
    model = testing.qlora_model(config, compute_dtype=torch.float32, randomize_adapters=True)
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(3))

    def distilled() -> tuple[int, torch.Tensor]:
        model.zero_grad()
        given = model(input_ids=ids, output_hidden_states=True).hidden_states
        sum(states.float().square().mean() for states in given[1:]).backward()
        return len(given), torch.cat([g.flatten() for g in gradients({}, model).values()])

    if checkpointed:
        enable(False)(model)
    count, expected = distilled()
    for layer in model.get_base_model().model.layers:
        layer._forward_hooks.clear()
    model.get_base_model().model._output_capturing_hooks_installed = False
    inductor_q.compile(model)
    torch._dynamo.reset()
    with no_codegen(), testing.CompileTrace() as trace:
        found, compiled = distilled()
        model(input_ids=ids, labels=ids).loss.backward()
    assert found == count == config.num_hidden_layers + 1
    assert (trace.graphs, trace.breaks) == (2, [])
    assert testing.relative_error(compiled, expected) < 1e-4


def test_packed_experts_are_in_the_graph_of_a_checkpointed_layer() -> None:
    model = with_packed_experts()
    enable(False)(model)
    eager = moe_step(model, model)
    prepare_checkpointing(model)
    prepare_checkpointing(model)
    torch._dynamo.reset()
    model.zero_grad()
    with testing.CompileTrace() as trace:
        compiled = moe_step(model, torch.compile(model, backend="eager"))
    assert (trace.graphs, trace.breaks) == (1, [])
    assert testing.relative_error(compiled, eager) < 0.02


def test_without_it_packed_experts_break_the_graph() -> None:
    """The hooks around them fill a dictionary of torch, which Dynamo lets no segment do. What
    explains the break names the way out."""
    experts = with_packed_experts().get_base_model().model.layers[0].mlp.experts
    x, chosen = torch.randn(4, 64, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 4)
    gates = torch.rand(4, 2, dtype=torch.bfloat16)

    def segment(x: torch.Tensor) -> Any:
        return checkpoint(experts, x, chosen, gates, use_reentrant=False)

    x.requires_grad_()
    torch._dynamo.reset()
    with observe() as observation:
        torch.compile(segment, backend="eager")(x)
    assert any("prepare_checkpointing" in b.fix for b in observation.explanation().breaks)
    prepare_checkpointing(experts)
    torch._dynamo.reset()
    torch.compile(segment, backend="eager", fullgraph=True)(x).sum().backward()


def test_packed_experts_are_decoded_once_in_eager_mode() -> None:
    """The loop over experts reads the weights once for each of them."""
    model = with_packed_experts()
    model.get_base_model().set_experts_implementation("eager")
    prepare_checkpointing(model)
    calls: list[None] = []
    experts = model.get_base_model().model.layers[0].mlp.experts
    decode = experts.parametrizations["down_proj"]
    decode.register_forward_hook(lambda *_: calls.append(None))
    moe_step(model, model)
    assert len(calls) == 1
    assert torch.nn.utils.parametrize._cache == {}


def test_layers_share_a_graph_once_their_packed_experts_are_stacks() -> None:
    """torch numbers hooks through all modules and gives each parametrized one a class of its own,
    and Dynamo guards on both."""
    model = with_packed_experts(layers=3)
    eager = moe_step(model, model)
    model.zero_grad()
    quantize(model)
    held = model.get_base_model().model.layers[1].mlp.experts
    assert not held._forward_hooks and not held._forward_pre_hooks
    assert not held._forward_hooks_always_called
    inductor_q.compile(model, regions="layers")
    torch._dynamo.reset()
    with testing.CompileTrace() as trace:
        compiled = moe_step(model, model)
    assert (trace.graphs, trace.breaks) == (1, [])
    assert testing.relative_error(compiled, eager) < 0.05


def test_layers_that_share_no_graph_are_told_of_stacks(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    inductor_q.compile(with_packed_experts(layers=2), regions="layers")
    assert "2 kinds of layers share no graph" in caplog.text
    assert "experts.quantize" in caplog.text
    caplog.clear()
    warn_once.cache_clear()
    stacked = with_packed_experts(layers=2)
    quantize(stacked)
    inductor_q.compile(stacked, regions="layers")
    inductor_q.compile(with_packed_experts(layers=1), regions="layers")
    assert "share no graph" not in caplog.text
