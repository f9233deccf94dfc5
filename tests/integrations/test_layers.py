"""Layers compiled one by one: one graph serves all, and each is what it is in eager mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import inductor_q
from inductor_q import backend, testing
from inductor_q.integrations import prepare_checkpointing
from inductor_q.integrations.states import region_of
from inductor_q.log import warn_once
from inductor_q.options import check_options
from tests.support.compiling import SMALL, gradients, no_codegen
from tests.support.layers import layered, qwen3

for extra in ("bitsandbytes", "transformers"):
    pytest.importorskip(extra)
pytest.importorskip("peft")

IDS = torch.arange(32).reshape(2, 16)
MASK = torch.ones_like(IDS)
MASK[1, -4:] = 0

CLOSE = 1e-5


def step(model: nn.Module) -> dict[str, Tensor]:
    labels = IDS.masked_fill(MASK == 0, -100)
    model(input_ids=IDS, attention_mask=MASK, labels=labels).loss.backward()
    return gradients({}, model)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
def test_gradients_of_layers_that_share_a_graph_are_eagers(checkpointed: bool) -> None:
    """The first layer too: what it is given requires a gradient there, as in the others."""
    model = qwen3(3)
    if checkpointed:
        model.gradient_checkpointing_enable()
        prepare_checkpointing(model)
    expected = step(model)
    assert len(expected) == 3 * 7 * 2
    layered(model)
    with no_codegen(), testing.CompileTrace() as trace:
        found = step(model)
    assert (trace.graphs, trace.breaks, trace.recompiles) == (1, [], [])
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert testing.relative_error(found[name], gradient) < CLOSE, name
    report = inductor_q.report(model)
    assert (report.fused, len(report.layers)) == (3 * 7, 3 * 7)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.proj: Any = testing.lora_linear(
            32, 32, r=4, dropout=dropout, compute_dtype=torch.float32
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj(x)
        return y


class Blocks(nn.Module):
    """Two equal layers beside each other, so that only their masks differ."""

    _no_split_modules = ("Block",)

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(dropout), Block(dropout)])

    def forward(self, x: Tensor) -> list[Tensor]:
        return [block(x) for block in self.blocks]


def test_a_layer_in_which_nothing_trains_runs_no_backward() -> None:
    """Nor do the layers before the first one that trains."""
    model, x = Blocks(0.0), torch.randn(2, 16, 32)
    model.blocks[0].requires_grad_(False)
    layered(model)
    with no_codegen():
        first, second = model(x)
    assert (first.requires_grad, second.requires_grad) == (False, True)
    assert not x.requires_grad


def test_layers_that_share_a_graph_have_masks_of_their_own(graph_or_code: None) -> None:
    """What an adapter adds is linear in A and in B: the gradients say whether backward has the mask
    of forward, in each layer and each step. What is added beside it is the same everywhere."""
    model, x = Blocks(0.5), torch.randn(2, 16, 32)
    layered(model)
    seen: list[tuple[Tensor, Tensor]] = []
    with testing.CompileTrace() as trace:
        for _ in range(2):
            outputs = model(x)
            torch.stack(outputs).sum().backward()
            for block, output in zip(model.blocks, outputs, strict=True):
                told = []
                for parameter in testing.adapter_parameters(block):
                    assert parameter.grad is not None
                    told.append((parameter.detach() * parameter.grad).sum())
                    parameter.grad = None
                assert torch.allclose(told[0], told[1], rtol=1e-4)
                seen.append((output.detach(), told[0]))
    assert trace.graphs == 1
    for at, (one, added) in enumerate(seen):
        for other, also_added in seen[:at]:
            assert testing.relative_error(other, one) > 1e-2
            difference = (one - other).sum()
            assert torch.allclose(difference, added - also_added, rtol=1e-3, atol=1e-2)


def test_gradients_by_torch_func() -> None:
    """torch.func lets nobody say what requires a gradient."""
    model, x = Blocks(0.0), torch.randn(2, 16, 32)
    weights = {name: w.detach() for name, w in model.named_parameters() if w.requires_grad}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.stack(torch.func.functional_call(model, weights, (x,))).square().sum()

    expected = torch.func.grad(loss)(weights)
    layered(model)
    with no_codegen():
        found = torch.func.grad(loss)(weights)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def test_layers_train_without_the_cache_that_a_configuration_asks_for(told: list[str]) -> None:
    """transformers' default: a model makes an empty cache in each forward."""
    model = qwen3(2)
    expected = step(model)
    model.config.use_cache = True
    layered(model)
    with no_codegen(), testing.CompileTrace() as trace:
        found = step(model)
    assert (trace.graphs, trace.breaks, trace.recompiles) == (1, [], [])
    for name, gradient in expected.items():
        assert testing.relative_error(found[name], gradient) < CLOSE, name
    assert [line for line in told if "keep no keys and values" in line] == told
    with torch.no_grad():
        cache = model(input_ids=IDS).past_key_values
    assert cache.get_seq_length() == IDS.shape[1], "without gradients the cache is kept"


def test_the_only_layer_of_a_model_trains_without_the_cache_too(told: list[str]) -> None:
    warn_once.cache_clear()
    model = qwen3(1)
    model.config.use_cache = True
    layered(model)
    with no_codegen(), testing.CompileTrace() as trace:
        step(model)
    assert (trace.graphs, trace.breaks) == (1, [])
    assert any("keep no keys and values" in line for line in told)


@pytest.mark.parametrize("cached", [False, True])
def test_an_evaluation_that_makes_a_cache_says_that_layers_are_not_compiled(
    told: list[str], cached: bool
) -> None:
    warn_once.cache_clear()
    model = qwen3(2).eval()
    model.config.use_cache = cached
    layered(model)
    with no_codegen(), torch.no_grad(), testing.CompileTrace() as trace:
        model(input_ids=IDS, labels=IDS)
    assert trace.graphs == int(not cached)
    assert bool(told) == any("an evaluation by layers" in line for line in told) == cached


def test_an_evaluation_of_an_encoder_says_nothing_of_a_cache(told: list[str]) -> None:
    """Its configuration has `use_cache` too."""
    from transformers import BertConfig, BertForMaskedLM

    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    model = BertForMaskedLM(BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)).eval()
    assert model.config.use_cache
    warn_once.cache_clear()
    layered(model)
    with no_codegen(), torch.no_grad(), testing.CompileTrace() as trace:
        model(input_ids=IDS, labels=IDS)
    assert trace.graphs
    assert not told


def test_a_cache_of_another_name() -> None:
    """Layers of GPT-NeoX, Falcon and others are given it as `layer_past`."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    config = GPTNeoXConfig(**sizes, num_hidden_layers=3, num_attention_heads=2)
    torch.manual_seed(0)
    model = GPTNeoXForCausalLM(config).train()
    expected = step(model)
    model.zero_grad()
    layered(model)
    with no_codegen(), testing.CompileTrace() as trace:
        found = step(model)
        with torch.no_grad():
            model.eval()
            model.generate(IDS[:, :4], max_new_tokens=3, min_new_tokens=3)
    assert (trace.graphs, trace.breaks, trace.recompiles) == (1, [], [])
    for name, gradient in expected.items():
        assert testing.relative_error(found[name], gradient) < CLOSE, name


def test_layers_that_read_a_cache_say_that_they_are_not_compiled(told: list[str]) -> None:
    model = qwen3(2)

    def loss() -> float:
        with torch.no_grad():
            before = model(input_ids=IDS[:, :8], use_cache=True).past_key_values
        call = {"past_key_values": before, "use_cache": True, "labels": IDS[:, 8:]}
        return float(model(input_ids=IDS[:, 8:], **call).loss)

    expected = loss()
    layered(model)
    with no_codegen(), testing.CompileTrace() as trace:
        assert loss() == pytest.approx(expected, rel=CLOSE)
    assert trace.graphs == 0
    assert [line for line in told if "reads keys and values of tokens before it" in line] == told


def test_layers_of_an_encoder_and_a_decoder_are_compiled() -> None:
    """Its decoder makes a cache for each of its attentions, as empty as another model's."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4}
    config = transformers.T5Config(**sizes, num_layers=2, dropout_rate=0.0, pad_token_id=0)
    config.decoder_start_token_id = 0
    base = transformers.T5ForConditionalGeneration(config)
    inductor_q.quantize(base, {"bnb": {"compute_dtype": torch.float32}}, progress=False)
    lora = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=4, target_modules=["q", "v"])
    model = peft.get_peft_model(base, lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    expected = step(model)
    assert len(expected) == 6 * 2 * 2  # attentions, projections, A and B
    layered(model)
    with no_codegen(), testing.CompileTrace() as trace:
        found = step(model)
    assert trace.graphs == 4 and not trace.breaks  # the first of each is given no position_bias
    for name, gradient in expected.items():
        assert testing.relative_error(found[name], gradient) < CLOSE, name
    report = inductor_q.report(model)
    assert report.fused == len(report.layers)


@pytest.mark.parametrize(
    "settings", [{"options": "fast"}, {"dynamic": "yes"}], ids=["options", "dynamic"]
)
def test_settings_of_no_known_kind(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(
        inductor_q.exc.InvalidOptionValue, match=f"option '{name}': '{settings[name]}'"
    ):
        inductor_q.compile(nn.Linear(4, 4), **settings)


def test_layers_are_no_cuda_graphs(told: list[str]) -> None:
    """Each would overwrite what the one before it has returned, and it reads, without backward."""
    model, graphs = qwen3(2), {"triton.cudagraphs": True}
    torch.compiler.reset()
    inductor_q.compile(model, options=graphs, regions="layers")
    with no_codegen():
        step(model)
    (report,) = backend.reports()
    assert report.options["triton.cudagraphs"]["value"] == "False"
    assert told[0].startswith(
        "inductor_q.compile: CUDA graphs (triton.cudagraphs: user) stay off. A layer's may"
    )
    before = [region_of(layer) for layer in model.modules() if region_of(layer)]
    inductor_q.compile(model, options=graphs, regions="layers")
    assert before == [region_of(layer) for layer in model.modules() if region_of(layer)]


def test_what_is_for_dynamo_reaches_it() -> None:
    model, x = Blocks(0.0), torch.randn(2, 16, 32)
    torch.compiler.reset()
    seen: list[int] = []

    def all_of(guards: Sequence[Any]) -> list[bool]:
        seen.append(len(guards))
        return [True] * len(guards)

    options = {**SMALL, "guard_filter_fn": all_of}
    check_options(options)
    inductor_q.compile(model, options=options, regions="layers")
    with no_codegen():
        model(x)
    assert seen
