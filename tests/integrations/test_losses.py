"""The loss of a model whose layers are compiled one by one is a graph of its own."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import inductor_q
from inductor_q import backend, testing
from inductor_q.integrations import prepare_checkpointing
from inductor_q.logits import Logits
from tests.support.compiling import SMALL, gradients, no_codegen
from tests.support.layers import layered, qwen3

for extra in ("bitsandbytes", "transformers"):
    pytest.importorskip(extra)
pytest.importorskip("peft")

CHUNKED: Any = {**SMALL, "qfuse.thresholds": {**SMALL["qfuse.thresholds"]}}
CHUNKED["qfuse.thresholds"]["chunk_loss.min_logits"] = 1
CLOSE = 1e-5


def call(model: Any, length: int = 12, **more: Any) -> Any:
    ids = torch.arange(2 * length).reshape(2, length)
    labels = ids.clone()
    labels[1, -4:] = -100
    return model(input_ids=ids, labels=labels, **more)


def step(model: Any, length: int = 12, **more: Any) -> tuple[Tensor, dict[str, Tensor]]:
    loss = call(model, length, **more).loss
    loss.backward()
    return loss.detach(), gradients({}, model)


def equal(found: tuple[Tensor, dict[str, Tensor]], right: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0], right[0])
    assert found[1].keys() == right[1].keys()
    for name, gradient in right[1].items():
        whole: Any = found[1][name]
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        assert testing.relative_error(whole, gradient) < CLOSE, name


def chunked() -> list[int]:
    """Count the losses that each graph has in chunks."""
    return [each.applied().get("chunk_loss", 0) for each in backend._reports]


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_gradients_are_eagers(checkpointed: bool) -> None:
    model = qwen3()
    if checkpointed:
        model.gradient_checkpointing_enable()
        prepare_checkpointing(model)
    lengths = (12, 16, 24)
    expected = [step(model, length) for length in lengths]
    layered(model, CHUNKED)
    with no_codegen(), testing.CompileTrace() as trace:
        found = [step(model, length) for length in lengths]
    assert (trace.graphs, trace.breaks) == (4, []), "one for the first length, one for the others"
    assert chunked() == [0, 1, 0, 1]
    for each, right in zip(found, expected, strict=True):
        equal(each, right)


def test_a_trained_head_and_what_trainers_give(told: list[str]) -> None:
    """Trainer gives the number of labels in all batches of a step, and reads no logits."""
    model = qwen3()
    model.get_base_model().lm_head.weight.requires_grad_(True)
    given: Any = {"num_items_in_batch": torch.tensor(31)}
    expected, logits = step(model, **given), call(model).logits
    layered(model, CHUNKED)
    with no_codegen():
        found, returned = step(model, **given), call(model).logits
    assert "base_model.model.lm_head.weight" in found[1]
    equal(found, expected)
    assert isinstance(returned, Logits) and not told
    torch.testing.assert_close(returned * 1, logits)


def test_router_logits_are_in_the_loss() -> None:
    sizes = {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}
    config = testing.tiny_qwen3_moe_config(**sizes, output_router_logits=True)
    model = testing.qlora_model(config, compute_dtype=torch.float32, randomize_adapters=True)
    expected = step(model)
    layered(model, CHUNKED)
    with no_codegen():
        found = step(model)
    assert chunked()[-1] == 1
    equal(found, expected)


def test_a_decoder_that_another_thread_calls_meanwhile() -> None:
    """It gets what the decoder returns: the forward that ends behind its decoder is not its own."""
    model = qwen3()
    expected = step(model)
    layered(model, CHUNKED)
    decoder = model.get_base_model().model
    ids = torch.arange(24).reshape(2, 12)
    others: list[Any] = []

    def other() -> None:
        with torch.no_grad():
            others.append(decoder(input_ids=ids).last_hidden_state)

    def once(*_: Any) -> None:
        hook.remove()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    hook = decoder.norm.register_forward_hook(once)
    with no_codegen():
        found = step(model)
    assert chunked()[-1] == 1
    assert [type(each) for each in others] == [Tensor]
    equal(found, expected)


def fsdp1(model: Any) -> nn.Module:
    policy = ModuleWrapPolicy({type(model.get_base_model().model.layers[0])})
    device = torch.device("cpu")
    return FSDP(model, auto_wrap_policy=policy, use_orig_params=True, device_id=device)


def fsdp2(model: Any) -> nn.Module:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for part in (*model.get_base_model().model.layers, model):
        fully_shard(part, mesh=mesh)
    sharded: nn.Module = model
    return sharded


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("shard", [fsdp1, fsdp2])
def test_layers_that_fsdp_shards(shard: Callable[[Any], nn.Module]) -> None:
    model = qwen3(quant_storage=torch.float32)
    expected = step(model)
    torch.compiler.reset()
    sharded = inductor_q.compile(shard(model), options=CHUNKED)
    with no_codegen(), testing.CompileTrace() as trace:
        for _ in range(2):
            loss, found = step(sharded)
    assert (trace.graphs, trace.breaks) == (2, []) and chunked() == [0, 1]
    names = {name: name.replace("_fsdp_wrapped_module.", "") for name in found}
    equal((loss, {names[name]: gradient for name, gradient in found.items()}), expected)


@pytest.mark.usefixtures("group")
def test_a_head_that_fsdp_shards_by_itself_is_left() -> None:
    """Its hooks would break the graph of the loss."""
    model = qwen3(quant_storage=torch.float32)
    expected = step(model)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    fully_shard(model.get_base_model().lm_head, mesh=mesh)
    torch.compiler.reset()
    sharded = inductor_q.compile(fsdp2(model), options=CHUNKED)
    with no_codegen(), testing.CompileTrace() as trace:
        equal(step(sharded), expected)
    assert (trace.graphs, trace.breaks) == (1, []) and not any(chunked())


def test_calls_that_do_not_train_are_left() -> None:
    """Evaluation keeps its logits, and steps without labels have no loss."""
    model = qwen3()
    layered(model, CHUNKED)
    with no_codegen():
        logits = model(input_ids=torch.arange(8)[None]).logits
        assert type(logits) is Tensor and logits.requires_grad
        with torch.no_grad():
            assert type(call(model).logits) is Tensor
        model.eval()
        assert type(call(model).logits) is Tensor
    assert not any(chunked())
    assert model.generate(input_ids=torch.arange(8)[None], max_new_tokens=2).shape == (1, 10)


@pytest.mark.parametrize(
    "options",
    [SMALL, {**CHUNKED, "qfuse.loss": "whole"}, {**CHUNKED, "qfuse.passes": "-chunk_loss"}],
)
def test_where_the_loss_stays_whole_it_is_not_compiled(options: Any) -> None:
    model = qwen3()
    expected = step(model)
    layered(model, options)
    with no_codegen(), testing.CompileTrace() as trace:
        found = step(model)
    assert trace.graphs == 1
    equal(found, expected)


def test_a_decoder_with_hooks_runs_as_it_is() -> None:
    model, seen = qwen3(), []
    expected = step(model)
    decoder = model.get_base_model().model
    decoder.register_forward_hook(lambda *args: seen.append(type(args[-1]).__name__))
    layered(model, CHUNKED)
    with no_codegen():
        equal(step(model), expected)
    assert seen == ["BaseModelOutputWithPast"] and not any(chunked())


def test_a_replaced_forward_stays() -> None:
    """Such as TRL's, which computes the loss in chunks of its own."""
    model = qwen3()
    base, calls = model.get_base_model(), []
    before = base.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return before(*args, **kwargs)

    base.forward = forward
    layered(model, CHUNKED)
    with no_codegen():
        step(model)
    assert len(calls) == 1 and base.forward is forward and not any(chunked())


def test_a_decoder_that_is_called_twice() -> None:
    model = qwen3()
    base = model.get_base_model()

    class Again(type(base)):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, labels: Tensor, **more: Any) -> Any:
            first = self.model(input_ids=input_ids).last_hidden_state
            second = self.model(input_ids=input_ids.flip(1)).last_hidden_state
            logits = self.lm_head(first + 2 * second)
            loss = self.loss_function(logits, labels, self.config.vocab_size)
            return type("Output", (), {"loss": loss})()

    base.__class__ = Again
    expected = step(base)
    layered(base, CHUNKED)
    with no_codegen():
        equal(step(base), expected)


def test_copies_and_other_regions_have_the_forward_of_their_class() -> None:
    model = qwen3()
    expected = step(model)
    layered(model, CHUNKED)
    with no_codegen():
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            equal(step(copied), expected)
            assert not any(chunked())
        equal(step(model), expected)
        assert chunked()[-1] == 1
        torch.compiler.reset()
        inductor_q.compile(model, options=CHUNKED, regions="model")
        base = model.get_base_model()
        assert base._compiled_call_impl is None
        equal(step(model), expected)
    assert chunked() == [1]


def test_signatures_and_what_generate_infers_stay() -> None:
    """`generate` asks the signature whether it is to make a mask of the padding token."""
    model = qwen3()
    base = model.get_base_model()
    base.generation_config.pad_token_id, base.generation_config.eos_token_id = 0, None
    ids = torch.randint(3, 200, (2, 8), generator=torch.Generator().manual_seed(0))
    ids[1, :3] = 0
    signatures = [inspect.signature(part.forward) for part in (base, base.model)]
    asked: Any = {"input_ids": ids, "max_new_tokens": 3, "do_sample": False}
    expected = model.generate(**asked)
    layered(model, CHUNKED)
    with no_codegen():
        step(model)
    assert [inspect.signature(part.forward) for part in (base, base.model)] == signatures
    model.eval()
    assert torch.equal(model.generate(**asked), expected)


def test_a_loss_that_transformers_does_not_know_is_left() -> None:
    """It warns of its choice there, which breaks a graph."""
    model = qwen3()
    model.get_base_model().loss_type = None
    layered(model, CHUNKED)
    with no_codegen(), testing.CompileTrace() as trace:
        step(model)
    assert (trace.graphs, trace.breaks) == (1, [])


def test_a_loss_that_is_not_in_chunks_is_compiled_once() -> None:
    """By a function that the pass does not read: the next step runs it as it is."""

    def squares(logits: Tensor, labels: Tensor, vocab_size: int, **more: Any) -> Tensor:
        return logits.float().square().mean()

    model = qwen3()
    model.get_base_model().loss_function = squares
    expected = step(model)
    layered(model, CHUNKED)
    with no_codegen():
        equal(step(model), expected)
        assert len(backend._reports) == 2
        equal(step(model, 16), step(model, 16))
    assert len(backend._reports) == 3, "that of layers for the other length"


def test_a_model_is_freed() -> None:
    model = qwen3()
    layered(model, CHUNKED)
    with no_codegen():
        step(model)
    held = weakref.ref(model.get_base_model())
    del model
    torch.compiler.reset()
    gc.collect()
    assert held() is None
