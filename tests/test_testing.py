"""The builders every other test leans on: are the models real, are the counters right?"""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch

from inductor_q import testing
from inductor_q.exc import MissingExtra

bnb = pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
pytest.importorskip("transformers")


def ids(batch: int = 2, length: int = 16) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("config", [testing.tiny_llama_config, testing.tiny_qwen3_config])
def test_every_projection_is_a_bitsandbytes_linear_under_an_adapter(config: Any) -> None:
    model = testing.qlora_model(config(num_hidden_layers=1))
    quantized = {
        name.split(".")[-2]: module
        for name, module in model.named_modules()
        if isinstance(module, bnb.nn.Linear4bit) and name.endswith("base_layer")
    }
    assert set(quantized) == set(testing.PROJECTIONS)
    for module in quantized.values():
        assert module.weight.dtype == torch.uint8
        assert module.weight.quant_state.nested
        assert module.weight.quant_state.quant_type == "nf4"
    trained = testing.adapter_parameters(model)
    assert len(trained) == 2 * len(testing.PROJECTIONS)
    assert {parameter.dtype for parameter in trained} == {torch.float32}  # PEFT's default


def test_a_prepared_model_is_float32_but_for_what_is_quantized() -> None:
    model = testing.qlora_model(testing.tiny_qwen3_config(num_hidden_layers=1), prepare=True)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    packed = {name for name, dtype in dtypes.items() if dtype == torch.uint8}
    assert len(packed) == len(testing.PROJECTIONS)
    assert {dtypes[name] for name in dtypes.keys() - packed} == {torch.float32}
    assert len(testing.adapter_parameters(model)) == 2 * len(testing.PROJECTIONS)
    query = model.base_model.model.model.layers[0].self_attn.q_proj
    assert query.base_layer.compute_dtype == torch.bfloat16
    assert not model.is_gradient_checkpointing


def test_options_reach_the_modules() -> None:
    model = testing.qlora_model(
        testing.tiny_llama_config(num_hidden_layers=1),
        quant_type="fp4",
        nested=False,
        blocksize=128,
        adapter_dtype=torch.bfloat16,
        targets=("q_proj", "v_proj"),
        r=4,
        adapters=2,
    )
    state = model.base_model.model.model.layers[0].mlp.gate_proj.weight.quant_state
    assert (state.quant_type, state.nested, state.blocksize) == ("fp4", False, 128)
    query = model.base_model.model.model.layers[0].self_attn.q_proj
    assert query.active_adapters == ["default", "adapter_1"]
    trained = testing.adapter_parameters(model)
    assert len(trained) == 8
    assert {parameter.dtype for parameter in trained} == {torch.bfloat16}
    assert 4 in trained[0].shape


def test_the_same_seed_builds_the_same_model() -> None:
    first, second = (testing.qlora_model(testing.tiny_llama_config(), seed=3) for _ in range(2))
    other = testing.qlora_model(testing.tiny_llama_config(), seed=4)
    pairs = list(zip(first.parameters(), second.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not all(
        torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True)
    )


def test_reference_model_measures_the_error_of_bf16_and_leaves_the_model_alone() -> None:
    model = testing.qlora_model(testing.tiny_llama_config(), randomize_adapters=True)
    before = [module for module in model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    reference = testing.reference_model(model)
    assert [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)] == before
    assert not any(isinstance(module, bnb.nn.Linear4bit) for module in reference.modules())
    assert {p.dtype for p in reference.parameters()} == {torch.float64}
    tokens = ids()
    out = model(input_ids=tokens).logits
    exact = reference(input_ids=tokens).logits
    error = testing.relative_error(out, exact)
    assert 1e-4 < error < 5e-2
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert names == [name for name, p in reference.named_parameters() if p.requires_grad]


def test_reference_of_one_linear() -> None:
    model = testing.lora_linear(48, 64, bias=True)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    exact = testing.reference_model(model)(x.double())
    assert testing.relative_error(model(x), exact) < 1e-2
    assert testing.relative_error(torch.zeros_like(exact), exact) == 1.0


def test_relative_error_of_nan_is_nan() -> None:
    value = testing.relative_error(torch.tensor([float("nan"), 1.0]), torch.ones(2))
    assert value != value


def test_count_saved_bytes_counts_each_storage_once_and_not_the_model() -> None:
    linear = torch.nn.Linear(8, 8, bias=False)
    x = torch.randn(4, 8, requires_grad=True)

    def twice() -> torch.Tensor:
        y = x * 2  # saved by both products, one storage
        out: torch.Tensor = linear(y) + linear(y)
        return out

    saved = testing.count_saved_bytes(twice, linear)
    assert saved.total == 4 * 8 * 4
    assert saved.tensors == [((4, 8), torch.float32)]
    assert testing.count_saved_bytes(twice).total == 4 * 8 * 4 + 8 * 8 * 4


def test_count_saved_bytes_keeps_nothing_alive() -> None:
    # exp saves its own output: handed back as it is, the node would own itself.
    outputs: list[weakref.ref[torch.Tensor]] = []

    def forward() -> torch.Tensor:
        y = torch.ones(3, requires_grad=True).exp()
        outputs.append(weakref.ref(y))
        return y

    assert testing.count_saved_bytes(forward).total == 12
    gc.collect()
    assert outputs[0]() is None


def test_count_saved_bytes_of_a_quantized_linear_is_the_activation_only() -> None:
    model = testing.lora_linear(256, 128, r=4)
    x = torch.randn(2, 128, dtype=torch.bfloat16, requires_grad=True)
    saved = testing.count_saved_bytes(lambda: model(x), model)
    assert all(128 * 256 not in shape for shape, _ in saved.tensors)
    assert 0 < saved.total < 128 * 256


def test_compile_trace_sees_a_break_and_a_graph() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    torch.compiler.reset()
    with testing.CompileTrace() as trace:
        torch.compile(broken, backend="eager")(torch.ones(3))
    assert len(trace.breaks) == 1
    assert trace.graphs == 2
    with testing.CompileTrace() as trace:
        torch.compile(torch.sin, backend="eager")(torch.ones(3))
    assert (trace.breaks, trace.graphs) == ([], 1)


def test_adapter_state_round_trip() -> None:
    model = testing.lora_linear(32, 32, r=2)
    state = testing.adapter_state(model)
    with torch.no_grad():
        for parameter in testing.adapter_parameters(model):
            parameter.zero_()
    testing.load_adapter_state(model, state)
    assert all(torch.equal(a, b) for a, b in zip(testing.adapter_state(model), state, strict=True))


def test_tokenizer_round_trip_and_batches() -> None:
    tokenizer = testing.ByteTokenizer()
    text = "Näive bytes, 4 bits.\n" * 5
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([65, tokenizer.eos_id, 66]) == "AB"
    first, again = (
        list(testing.batches(text, tokenizer, batch_size=2, seq_len=8, steps=3, seed=1))
        for _ in range(2)
    )
    assert [tuple(batch.shape) for batch in first] == [(2, 8)] * 3
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    with pytest.raises(ValueError, match="fewer than seq_len=800"):
        next(testing.batches(text, tokenizer, batch_size=1, seq_len=800, steps=1))


def test_qfuse_backend_without_an_entry_point_is_the_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = pytest.importorskip("inductor_q.backend")
    monkeypatch.setattr(torch._dynamo, "list_backends", lambda *args: ["inductor"])
    assert testing.qfuse_backend() is backend.qfuse
    monkeypatch.setattr(torch._dynamo, "list_backends", lambda *args: ["inductor", "qfuse"])
    assert testing.qfuse_backend() == "qfuse"


def test_a_missing_extra_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    expected = "building this model needs bitsandbytes, .* pip install 'inductor-q\\[bnb\\]'"
    with pytest.raises(MissingExtra, match=expected):
        testing.quantized_linear(torch.zeros(4, 64))
