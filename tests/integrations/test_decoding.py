"""`compile_decoding`: the steps of `generate` in one graph, and the model looked at once a text."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import inductor_q
from inductor_q import testing
from inductor_q.integrations import compile_decoding
from inductor_q.integrations.decoding import Decoding, facts_of
from inductor_q.integrations.states import region_of

for extra in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(extra)

TOGETHER = 16  # tokens of prompt and text, so that caches are of one length


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def model() -> Any:
    made = testing.qlora_model(
        testing.tiny_llama_config(num_hidden_layers=1),
        compute_dtype=torch.float32,
        adapter_dtype=torch.float32,
        randomize_adapters=True,
        device="cpu",
    )
    return made.eval()


def text(model: Any, prompt: int = 8, **options: Any) -> Tensor:
    """Logits of what `generate` takes, each token but the prompt's last one behind a cache."""
    generator = torch.Generator().manual_seed(prompt)
    ids = torch.randint(0, 256, (1, prompt), generator=generator)
    new = TOGETHER - prompt
    given = {
        "attention_mask": torch.ones_like(ids),
        "min_new_tokens": new,
        "max_new_tokens": new,
        "do_sample": False,
        "use_cache": True,
        "cache_implementation": "static",
        "disable_compile": True,
        "pad_token_id": testing.ByteTokenizer.pad_id,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    result = model.generate(input_ids=ids, **{**given, **options})
    return torch.stack(result.logits, 1)


def adapted_layer(model: Any) -> Any:
    return next(m for m in model.modules() if hasattr(m, "lora_A"))


def close(ours: Tensor, theirs: Tensor) -> bool:
    return testing.relative_error(ours, theirs) < 1e-5


def test_texts_share_a_graph(model: Any) -> None:
    expected = {prompt: text(model, prompt) for prompt in (8, 5)}
    assert compile_decoding(model) is model
    with testing.CompileTrace() as trace:
        for prompt in (8, 5, 8):
            assert close(text(model, prompt), expected[prompt])
    assert (trace.graphs, trace.breaks) == (1, [])
    report = inductor_q.last_report()
    assert report is not None and report.applied()["canonicalize"] == 7
    assert list(model.state_dict()) == list(copy.deepcopy(model).state_dict())


def test_other_calls_run_as_before(model: Any) -> None:
    compile_decoding(model)
    ids = torch.randint(0, 256, (1, 6))
    with testing.CompileTrace() as trace:
        text(model, cache_implementation="dynamic")
        model(input_ids=ids, labels=ids).loss.backward()
        with torch.no_grad():
            model(input_ids=ids)
    assert trace.graphs == 0


def test_each_state_is_compiled_once(model: Any) -> None:
    torch.manual_seed(0)
    model.add_adapter("second", copy.deepcopy(model.peft_config["default"]))
    for name, parameter in model.named_parameters():
        if "lora_B.second" in name:
            torch.nn.init.normal_(parameter, std=0.1)

    def texts() -> list[Tensor]:
        found = []
        for name in ("default", "second"):
            model.set_adapter(name)
            found.append(text(model))
        with model.disable_adapter():
            found.append(text(model))
        return found

    expected = texts()
    assert not close(expected[0], expected[1]) and not close(expected[0], expected[2])
    compile_decoding(model)
    with testing.CompileTrace() as trace:
        for _ in range(2):
            for ours, theirs in zip(texts(), expected, strict=True):
                assert close(ours, theirs)
    assert (trace.graphs, trace.breaks) == (3, [])


def test_a_change_between_texts_is_seen(model: Any) -> None:
    """What a graph takes as constant: a scaling, a hook. A weight's values are read each time."""
    compile_decoding(model)
    before = text(model)
    layer = adapted_layer(model)
    layer.scaling["default"] *= 8
    scaled = text(model)
    with torch.no_grad():
        layer.lora_B["default"].weight.mul_(1 / 8)
    with testing.CompileTrace() as trace:
        assert close(text(model), before)
    assert trace.graphs == 0 and not close(scaled, before)
    layer.lora_A["default"].register_forward_hook(lambda module, given, out: 0 * out)
    hooked = text(model)
    assert not close(hooked, before)


def test_a_step_that_breaks_keeps_its_guards(
    model: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = model.base_model.model.model.norm
    real = norm.forward

    def forward(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        result: Tensor = real(x)
        return result

    expected = text(model)
    norm.forward = forward
    compile_decoding(model)
    with testing.CompileTrace() as trace:
        assert close(text(model), expected)
    assert trace.breaks
    assert "no whole graph" in caplog.text


def test_beside_a_compiled_model() -> None:
    """In either order; under other options decoding is compiled anew, and training stays so."""
    from transformers import AutoModelForCausalLM

    make: Any = AutoModelForCausalLM.from_config
    plain = make(testing.tiny_llama_config(num_hidden_layers=1)).eval()
    compile_decoding(plain)
    first = plain._compiled_call_impl
    inductor_q.compile(plain)
    assert plain._compiled_call_impl is first and region_of(plain) is not None
    compile_decoding(plain, mode="default")
    assert isinstance(plain._compiled_call_impl, Decoding)
    assert plain._compiled_call_impl is not first and region_of(plain) is not None
    ids = torch.randint(0, 256, (1, 6))
    with testing.CompileTrace() as trace:
        plain(input_ids=ids, labels=ids)
        text(plain)
    assert trace.graphs == 2


def test_facts_of_a_model(model: Any) -> None:
    facts = facts_of(model)
    hash(facts)
    assert facts == facts_of(model)
    layer = adapted_layer(model)
    state = layer.base_layer.weight.quant_state
    state.blocksize *= 2
    assert facts_of(model) != facts
    state.blocksize //= 2
    assert facts_of(model) == facts
    handle = layer.register_forward_pre_hook(lambda *_: None)
    assert facts_of(model) != facts
    handle.remove()
    assert facts_of(model) == facts
    layer.lora_A["default"].to(torch.bfloat16)
    assert facts_of(model) != facts
