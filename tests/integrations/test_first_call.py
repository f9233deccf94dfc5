"""What bitsandbytes does in the first call of a layer is done before anything is traced."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import inductor_q
from inductor_q import testing
from inductor_q.integrations.first_call import prepare_first_call
from tests.support.compiling import gradients, no_codegen

bnb: Any = pytest.importorskip("bitsandbytes")


def biased() -> Any:
    layer = testing.quantized_linear(torch.randn(64, 64), torch.randn(64))
    assert layer.bias.dtype is torch.float32
    return layer


def test_a_bias_gets_the_dtype_of_its_layer() -> None:
    layer = biased()
    other, bias, x = copy.deepcopy(layer), layer.bias, torch.randn(2, 64)
    prepare_first_call(nn.Sequential(layer))
    assert layer.bias is bias and bias.dtype is layer.compute_dtype is torch.bfloat16
    assert torch.equal(layer(x), other(x)) and torch.equal(layer.bias, other.bias)


def test_a_dtype_that_is_open_stays_open() -> None:
    layer = biased()
    layer.compute_dtype, layer.compute_type_is_set = None, False
    prepare_first_call(layer)
    assert layer.bias.dtype is torch.float32 and layer.compute_dtype is None


def test_codes_of_llm_int8_are_in_the_state() -> None:
    made = bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False, threshold=0.0)
    layer = made.to("cpu")
    assert layer.weight.CB is not None
    other, x = copy.deepcopy(layer), torch.randn(2, 64, dtype=torch.bfloat16)
    prepare_first_call(layer)
    assert layer.weight.CB is None and layer.state.CB is not None
    assert torch.equal(layer(x), other(x))
    prepare_first_call(layer)  # as for a model that is compiled again
    assert torch.equal(layer(x), other(x))


def test_a_bias_of_llm_int8_stays_beside_inputs_of_any_dtype() -> None:
    made = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False, threshold=0.0)
    layer = made.to("cpu")
    prepare_first_call(layer)
    for dtype in (torch.bfloat16, torch.float32):
        other, x = copy.deepcopy(layer), torch.randn(2, 64, dtype=dtype)
        vars(other).pop("forward")
        for run in (layer, other):
            run.train()
        assert torch.equal(layer(x), other(x)) and other.bias.dtype is dtype
        assert layer.bias.dtype is torch.float32
        prepare_first_call(layer)  # as for a model that is compiled again


@pytest.mark.parametrize("trains", [True, False])
def test_llm_int8_reads_the_codes_of_a_new_weight(trains: bool) -> None:
    """accelerate's offloading puts one in before each call."""
    layer, other = (
        bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False, threshold=0.0).to("cpu").train(trains)
        for _ in range(2)
    )
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    prepare_first_call(layer)
    layer(x)
    other.bias.data = layer.bias.data.clone()
    layer.weight = copy.deepcopy(other.weight)
    assert layer.weight.CB is not None
    assert torch.equal(layer(x), other(x))


def test_llm_int8_is_saved_whole(tmp_path: Path) -> None:
    layer = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False, threshold=0.0).to("cpu")
    prepare_first_call(layer)
    torch.save(layer, tmp_path / "layer.pt")
    loaded, x = torch.load(tmp_path / "layer.pt", weights_only=False), torch.randn(2, 64)
    assert torch.equal(loaded(x), layer(x))


def test_llm_int8_of_unpacked_weights_is_left_alone() -> None:
    layer = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=True)
    prepare_first_call(layer)
    assert "forward" not in vars(layer)


def test_a_forward_of_llm_int8_that_somebody_has_replaced_stays() -> None:
    layer = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False).to("cpu")
    layer.forward = lambda x: x
    prepare_first_call(layer)
    assert layer(1) == 1


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_biases_of_llm_int8_under_autocast_are_in_one_graph(dora: bool) -> None:
    """After attention the input has 16 bits, and after a norm in float32 it has not."""
    peft: Any = pytest.importorskip("peft")
    transformers: Any = pytest.importorskip("transformers")
    config = testing.tiny_qwen3_config(num_hidden_layers=1, attention_bias=True)
    base = transformers.AutoModelForCausalLM.from_config(config)
    inductor_q.quantize(base, "llm_int8", progress=False)
    lora = peft.LoraConfig(target_modules=["q_proj", "o_proj"], use_dora=dora)
    model = peft.get_peft_model(base, lora).train()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or name.endswith("bias"):
            parameter.data.normal_(std=0.1, generator=generator)
    eager = copy.deepcopy(model)
    for each in (model, eager):
        each.forward = torch.autocast("cpu", torch.bfloat16)(each.forward)  # as accelerate has it
    inductor_q.compile(model)
    ids = torch.randint(0, 256, (2, 16), generator=generator)
    found = []
    torch._dynamo.reset()
    with testing.CompileTrace() as trace, no_codegen():
        for each in (eager, model, eager, model):
            each(input_ids=ids, labels=ids).loss.backward()
            found.append(torch.cat([g.flatten() for g in gradients({}, each).values()]))
    assert (trace.graphs, trace.breaks, trace.recompiles) == (1, [], [])
    assert testing.relative_error(found[1], found[0]) < 0.02
    assert testing.relative_error(found[3], found[2]) < 0.02
