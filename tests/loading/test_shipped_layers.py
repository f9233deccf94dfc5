"""Linear layers of checkpoints as they ship: bitwise their libraries' values, fused and merged."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as transformers_package
from safetensors.torch import load_file, save_file
from torch import nn

import inductor_q
from inductor_q import exc, kbit
from inductor_q.integrations import prepare_dora
from inductor_q.kbit import meta_parameters
from inductor_q.loading.linear import PackedLinear
from inductor_q.testing import relative_error
from tests.support.compiling import compile_step, no_codegen
from tests.support.merged import merged_by_hand
from tests.support.moe_models import tokens
from tests.support.shipped import (
    BF16,
    CASES,
    COLUMNS,
    GENERATOR,
    Net,
    gptq,
    save_packed,
    saved,
    write,
)
from tests.support.shipped import seed as seed

transformers: Any = transformers_package


@pytest.mark.parametrize("case", CASES)
def test_a_linear_layer(case: str, tmp_path: Path) -> None:
    """Values, bitwise in float32 and in 16 bits; the product and its gradient; the rest of it."""
    config, state, values, format = CASES[case]()
    rest = write(tmp_path, config, state)
    with meta_parameters():
        net: Any = Net()
    assert inductor_q.load_checkpoint(net, tmp_path, progress=False) is net
    layer = net.packed
    assert type(layer) is PackedLinear and layer.format == format
    for dtype in (torch.float32, BF16, torch.float16):
        assert torch.equal(layer.dequantize(dtype), values.to(dtype)), dtype
    for name, value in rest.items():
        assert torch.equal(net.state_dict()[name], value)
    assert not any(t.is_meta for t in (*net.parameters(), *net.buffers()))
    x = torch.randn(3, COLUMNS, generator=GENERATOR).requires_grad_()
    y = layer.float()(x)  # a cast leaves codes and scales alone
    exact = x.detach().double().requires_grad_()
    bias = rest["packed.bias"].double()
    expected = exact @ values.double().t() + bias
    assert relative_error(y, expected) < 1e-6
    gradient = torch.randn(y.shape, generator=GENERATOR)
    y.backward(gradient)
    expected.backward(gradient.double())
    assert x.grad is not None and exact.grad is not None
    assert relative_error(x.grad, exact.grad) < 1e-6


@pytest.mark.parametrize("case", ["fp8 tiles", "gptq act-order", "nvfp4 of modelopt", "awq", "hqq"])
def test_a_step_of_lora_is_fused(case: str, tmp_path: Path) -> None:
    """PEFT takes the layer for the linear layer that it is, and passes read its weight."""
    peft: Any = pytest.importorskip("peft")
    config, state, _, _ = CASES[case]()
    write(tmp_path, config, state)
    with meta_parameters():
        net: Any = Net()
    inductor_q.load_checkpoint(net, tmp_path, progress=False)
    adapted = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["packed"])).to(BF16)
    x = torch.randn(4, COLUMNS, generator=GENERATOR).to(BF16)
    with no_codegen():
        result = compile_step(adapted, x.requires_grad_(), fullgraph=True)
    assert [v.status for v in result.report.verdicts().values()] == ["fused"]


def test_tensors_lie_where_they_are_asked_for(tmp_path: Path) -> None:
    config, state, _, _ = CASES["awq"]()
    write(tmp_path, config, state)
    with meta_parameters():
        net = Net()
    inductor_q.load_checkpoint(net, tmp_path, device="meta", progress=False)
    assert {t.device.type for t in net.state_dict().values()} == {"meta"}


@pytest.mark.parametrize(("nbits", "dtype"), [(4, BF16), (3, torch.float16)], ids=str)
def test_hqq_of_the_library(nbits: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """A layer that hqq 0.2.8 has quantized and saved, and what it dequantizes to."""
    state = load_file(Path(__file__).parent / f"hqq{nbits}.safetensors")
    expected = state.pop("dequantized")
    params = {"nbits": nbits, "group_size": 64, "axis": 1, "view_as_float": False}
    config = {"quant_config": {"packed": {"weight_quant_params": params}}, "quant_method": "hqq"}
    save_file({f"packed.{n}": t for n, t in state.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    net: Any = nn.Sequential()
    rows, columns = expected.shape
    net.packed = nn.Linear(columns, rows, bias=False, dtype=dtype)
    inductor_q.load_checkpoint(net, tmp_path, progress=False)
    assert expected.dtype == dtype
    assert torch.equal(net.packed.dequantize(dtype), expected)


@pytest.mark.parametrize(
    "said", [{}, {"desc_act": False, "dynamic": {"+:packed": {"desc_act": True}}}], ids=str
)
def test_the_order_of_inputs_is_read_where_it_is(said: dict[str, Any], tmp_path: Path) -> None:
    """GPTQModel may set act-order by layer, and a configuration may say nothing of it."""
    config, state, values, _ = gptq(act_order=True)
    del config["desc_act"]
    write(tmp_path, {**config, **said}, state)
    net: Any = Net()
    inductor_q.load_checkpoint(net, tmp_path, progress=False)
    assert torch.equal(net.packed.dequantize(torch.float32), values)


def test_an_order_of_zeros_is_none(tmp_path: Path) -> None:
    config, state, values, _ = gptq(act_order=False)
    write(tmp_path, config, {**state, "g_idx": torch.zeros_like(state["g_idx"])})
    net: Any = Net()
    inductor_q.load_checkpoint(net, tmp_path, progress=False)
    assert torch.equal(net.packed.dequantize(torch.float32), values)


def test_a_model_that_was_loaded_is_saved(tmp_path: Path) -> None:
    """Packed by kbit.save, or dequantized; else what save_pretrained writes names these."""
    state = saved("qwen3_moe", tmp_path)
    for name in [n for n in state if ".self_attn." in n and "_proj" in n]:
        state[name] = state[name].to(torch.float8_e4m3fn)
        state[f"{name}_scale_inv"] = torch.tensor(0.5)
    save_packed(tmp_path, state, {"quant_method": "fp8"})

    def load(folder: Path = tmp_path) -> Any:
        config = transformers.AutoConfig.from_pretrained(folder)
        with meta_parameters():
            net = transformers.AutoModelForCausalLM.from_config(config)
        return inductor_q.load_checkpoint(net, folder, progress=False)

    net = load()
    expected = net(tokens()).logits
    kbit.save(net, tmp_path / "packed.bin")
    assert torch.equal(kbit.load(load(), tmp_path / "packed.bin")(tokens()).logits, expected)
    with pytest.raises(exc.CannotSave, match=r"kbit\.save"):
        net.save_pretrained(tmp_path / "refused")
    net.save_pretrained(tmp_path / "packed", state_dict=net.state_dict())  # who insists
    with pytest.raises(exc.WrongCheckpoint, match=r"q_proj.qweight.* is saved by .*kbit.save; for"):
        load(tmp_path / "packed")
    kbit.dequantize_model(net)
    net.save_pretrained(tmp_path / "plain")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert relative_error(plain(tokens()).logits, expected) < 1e-5


# --- adapters -------------------------------------------------------------------------------------


def adapted_net(case: str, folder: Path, *, dora: bool = False) -> Any:
    peft: Any = pytest.importorskip("peft")
    config, state, _, _ = CASES[case]()
    write(folder, config, state)
    with meta_parameters():
        net: Any = Net()
    inductor_q.load_checkpoint(net, folder, progress=False)
    torch.manual_seed(2)
    lora = peft.LoraConfig(r=4, target_modules=["packed"], use_dora=dora, init_lora_weights=False)
    return peft.get_peft_model(net, lora).to(BF16)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("case", ["fp8 tiles", "gptq act-order", "awq"])
def test_an_adapter_is_merged_into_ordinary_layers(case: str, dora: bool, tmp_path: Path) -> None:
    """PEFT puts them in the place of packed ones, which come back bit by bit, or decoded."""
    adapted = adapted_net(case, tmp_path, dora=dora)
    x = torch.randn(40, COLUMNS, generator=GENERATOR).to(BF16)
    before, expected = copy.deepcopy(adapted.state_dict()), adapted(x)
    layer = adapted.base_model.model.packed
    values = layer.base_layer.dequantize(torch.float32)
    adapted.merge_adapter()
    weight = merged_by_hand(layer, values, dora=dora)
    assert relative_error(layer.base_layer.weight, weight) < 2**-9
    assert relative_error(adapted(x), expected) < 0.02
    adapted.unmerge_adapter()
    assert all(torch.equal(t, before[name]) for name, t in adapted.state_dict().items())
    plain: Any = kbit.dequantize_model(copy.deepcopy(adapted), torch.float32).float()
    merged = plain.merge_and_unload()
    assert type(merged.packed) is nn.Linear
    assert relative_error(merged(x.float()), expected) < 0.02  # of bfloat16


@pytest.mark.parametrize("case", ["fp8 tiles", "gptq act-order", "awq"])
def test_the_norms_of_dora_are_those_of_the_values(case: str, tmp_path: Path) -> None:
    adapted = adapted_net(case, tmp_path, dora=True)
    layer = adapted.base_model.model.packed
    a, b = (part["default"].weight.float() for part in (layer.lora_A, layer.lora_B))
    values = layer.base_layer.dequantize(torch.float32) + 2 * b @ a
    magnitude = layer.lora_magnitude_vector["default"].weight
    assert relative_error(magnitude, values.norm(dim=1)) < 0.01  # of bfloat16
    x = torch.randn(40, COLUMNS, generator=GENERATOR).to(BF16)
    expected = adapted(x)
    prepare_dora(adapted)
    with no_codegen():
        result = compile_step(adapted, x.requires_grad_(), fullgraph=True)
    assert relative_error(result.output, expected) < 0.02
    assert [v.status for v in result.report.verdicts().values()] == ["fused"]
