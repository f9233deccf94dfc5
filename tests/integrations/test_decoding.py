"""`compile_decoding`: the steps of `generate` in one graph, and the model looked at once a text."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import inductor_q
from inductor_q import testing
from inductor_q.integrations import compile_decoding
from inductor_q.integrations.decoding import Decoding
from inductor_q.integrations.facts import facts_of
from inductor_q.integrations.states import region_of
from inductor_q.log import warn_once

for extra in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(extra)

TOGETHER = 16  # tokens of prompt and text, so that caches are of one length


pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(autouse=True)
def warnings_again() -> None:
    warn_once.cache_clear()


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


def text(model: Any, prompt: int = 8, batch: int = 1, **options: Any) -> Tensor:
    """Logits of what `generate` takes, each token but the prompt's last one behind a cache."""
    generator = torch.Generator().manual_seed(prompt)
    ids = torch.randint(0, 256, (1, prompt), generator=generator).expand(batch, -1)
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


def test_steps_are_compiled_with_the_options(model: Any) -> None:
    compile_decoding(model, options={"qfuse.passes": "-canonicalize"}, mode="default")
    text(model, 5)
    report = inductor_q.last_report()
    assert report is not None and "canonicalize" not in report.applied()
    with pytest.raises(inductor_q.exc.UnknownOption, match=r"qfuse\.pases"):
        compile_decoding(model, options={"qfuse.pases": ""})


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


def test_what_makes_a_text(model: Any) -> None:
    """A prompt of one token is a prompt, and another cache is another text."""
    from transformers import StaticCache

    inner, layer = model.get_base_model(), adapted_layer(model)
    compile_decoding(model)
    text(model)
    layer.scaling["default"] *= 8
    with testing.CompileTrace() as trace:
        short = text(model, 1)
    assert trace.graphs == 1
    inner._compiled_call_impl = None
    assert close(short, text(model, 1))
    compile_decoding(model)

    def by_hand() -> Tensor:
        ids = torch.arange(6)[None]
        cache = StaticCache(config=inner.config, max_cache_len=TOGETHER)
        with torch.no_grad():
            inner.model(input_ids=ids[:, :-1], past_key_values=cache, use_cache=True)
            logits: Tensor = inner(
                input_ids=ids[:, -1:], past_key_values=cache, use_cache=True
            ).logits
        return logits

    before = by_hand()
    layer.scaling["default"] /= 8
    after = by_hand()
    inner._compiled_call_impl = None
    assert close(after, by_hand()) and not close(after, before)


def test_texts_of_one_size_share_a_cache(model: Any) -> None:
    """Its place in memory, unless somebody has the cache of the text before."""
    compile_decoding(model)
    decoding = model.get_base_model()._compiled_call_impl
    expected = text(model)
    gc.collect()  # Dynamo's variables of what it has traced are a cycle
    place = decoding.buffers[0]["keys"].data_ptr()
    assert close(text(model), expected) and decoding.buffers[0]["keys"].data_ptr() == place
    held = decoding.cache
    assert held() is None
    cache: list[Any] = []
    decoding.module.register_forward_hook(
        lambda module, given, out: cache.append(out.past_key_values)
    )
    text(model, 5)
    before = cache[-1].layers[0].keys.clone()
    assert close(text(model), expected)
    assert decoding.buffers[0]["keys"].data_ptr() != cache[0].layers[0].keys.data_ptr()
    assert torch.equal(cache[0].layers[0].keys, before)
    decoding.module._forward_hooks.clear()
    length = decoding.buffers[0]["keys"].shape[2]
    text(model, 8, max_new_tokens=20, min_new_tokens=20)
    assert decoding.buffers[0]["keys"].shape[2] > length
    assert close(text(model), expected)


def test_more_sizes_than_dynamo_keeps(model: Any) -> None:
    compile_decoding(model)
    for batch in range(1, 11):
        text(model, batch=batch)
    with testing.CompileTrace() as trace:
        text(model, batch=10)
    assert trace.graphs == 0


def test_caches_that_one_graph_cannot_serve(caplog: pytest.LogCaptureFixture, model: Any) -> None:
    from transformers import AutoModelForCausalLM, MistralConfig

    make: Any = AutoModelForCausalLM.from_config
    config = MistralConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        vocab_size=264,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=8,
    )
    sliding = make(config).eval()
    expected = text(sliding)
    compile_decoding(sliding)
    with testing.CompileTrace() as trace:
        assert torch.equal(text(sliding), expected)
        text(compile_decoding(model), output_hidden_states=True)
        text(model, cache_implementation=None)
    assert trace.graphs == 0
    assert "sliding windows" in caplog.text and "DynamicCache" in caplog.text


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
    assert "not one graph for many tokens" in caplog.text


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


class Steer:
    """A hook with a state of its own."""

    def __init__(self) -> None:
        self.by = 0.0

    def hook(self, module: Any, given: Any, out: Tensor) -> Tensor:
        return out + self.by


def _retype(layer: Any) -> None:
    layer.lora_A["default"].to(torch.bfloat16)


def _untie(layer: Any) -> None:
    layer.lora_A["default"].weight = torch.nn.Parameter(layer.lora_A["default"].weight.clone())


def _transpose(layer: Any) -> None:
    weight = layer.lora_A["default"].weight
    layer.lora_A["default"].weight = torch.nn.Parameter(weight.t().clone().t())


def _deepen(layer: Any) -> None:
    layer.notes["a"]["b"]["c"]["d"] = 2


def _steer(layer: Any) -> None:
    layer.steer.by = 1.0


@pytest.mark.parametrize("change", [_retype, _untie, _transpose, _deepen, _steer])
def test_facts_of_changes(model: Any, change: Any) -> None:
    layer = adapted_layer(model)
    layer.notes = {"a": {"b": {"c": {"d": 1}}}}
    layer.twin = torch.nn.Module()
    layer.twin.weight = layer.lora_A["default"].weight
    steer = Steer()
    layer.lora_A["default"].register_forward_hook(steer.hook)
    facts = facts_of(model)
    assert facts == facts_of(model)
    layer.steer = steer
    seen = facts_of(model)
    change(layer)
    assert facts_of(model) != seen
    hash(seen)


def test_facts_of_cycles() -> None:
    module, note = torch.nn.Linear(2, 2), Steer()
    vars(note)["me"] = note
    vars(module.weight)["owner"] = {"a": {"b": note}}
    assert facts_of(module) == facts_of(module)


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
