"""PEFT's merges into packed weights: ours where the layer below is ours, PEFT's own elsewhere."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import inductor_q
from inductor_q import exc, kbit, testing
from inductor_q.loading.merges import mend_merges
from tests.support.quantized_nets import BF16, Net, packed, tiny

peft: Any = pytest.importorskip("peft")
torchao: Any = pytest.importorskip("torchao.quantization")
transformers: Any = pytest.importorskip("transformers")


def put_back() -> None:
    import peft.tuners.lora.torchao as library

    for kind in (peft.tuners.lora.layer.Linear, library.TorchaoLoraLinear):
        for name in ("merge", "unmerge"):
            setattr(kind, name, inspect.unwrap(vars(kind)[name]))
    mend_merges.cache_clear()


@pytest.fixture(autouse=True)
def peft_as_it_comes() -> Iterator[None]:
    """Each test begins with PEFT's own functions, whatever ran before, and leaves those there."""
    put_back()
    yield
    put_back()


def adapted(model: Any, **more: Any) -> Any:
    settings = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(**{**settings, **more})).eval()


def layer_of(net: Any) -> Any:
    return net.base_model.model.model.layers[0].self_attn.q_proj


def tensors(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plain tensors in a subclass of torchao's, by name."""
    names, _ = weight.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(weight, name).clone() for name in names}


def loaded_by_transformers(tmp_path: Any, config: Any) -> Any:
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(
        testing.tiny_qwen3_config(num_hidden_layers=1), dtype=BF16
    )
    plain.save_pretrained(tmp_path)
    how = transformers.TorchAoConfig(config)
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(tmp_path, quantization_config=how, dtype=BF16)


CONFIGS = ["Int8DynamicActivationInt8WeightConfig", "Int8DynamicActivationIntxWeightConfig"]


@pytest.mark.parametrize("merged_before", [False, True], ids=["", "merged_before"])
@pytest.mark.parametrize("name", CONFIGS)
def test_models_that_are_not_ours_merge_as_without_us(
    name: str, merged_before: bool, tmp_path: Any
) -> None:
    """Bitwise, though another model is quantized before or between."""
    made = getattr(torchao, name)
    config = made(set_inductor_config=False) if name == CONFIGS[0] else made()
    states = []
    for with_ours in (False, True):
        torch.manual_seed(1)
        net = adapted(loaded_by_transformers(tmp_path, config))
        if with_ours and not merged_before:
            inductor_q.quantize(Net(), "int8", progress=False)
        net.merge_adapter()
        if with_ours and merged_before:
            inductor_q.quantize(Net(), "int8", progress=False)
        states.append(layer_of(net).base_layer.weight.dequantize())
        net.unmerge_adapter()
        states.append(layer_of(net).base_layer.weight.dequantize())
    assert torch.equal(states[0], states[2]) and torch.equal(states[1], states[3])
    assert not torch.equal(states[0], states[1])


def test_a_weight_that_torchao_packed_by_itself_is_pefts_affair() -> None:
    net: Any = Net()
    torchao.quantize_(net, torchao.Int8WeightOnlyConfig(set_inductor_config=False))
    inductor_q.quantize(Net(), "int8", progress=False)
    with pytest.warns(UserWarning, match="get_apply_tensor_subclass"):
        whole = adapted(net, target_modules=["up"])
    weight = net.up.base_layer.weight
    with pytest.raises(ValueError, match="without `get_apply_tensor_subclass`"):
        whole.merge_adapter()
    assert net.up.base_layer.weight is weight


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("asked", ["int8", "fp8_row", "nvfp4", "int8_g32"])
def test_unmerging_puts_back_what_was_there(asked: str, dora: bool) -> None:
    net = adapted(tiny(asked), use_dora=dora)
    layer = layer_of(net)
    before = tensors(layer.base_layer.weight)
    merged = None
    for _ in range(3):
        net.merge_adapter()
        again = inductor_q.dequantize(layer.base_layer.weight)
        assert merged is None or torch.equal(again, merged)
        merged = again
        net.unmerge_adapter()
        after = tensors(layer.base_layer.weight)
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert not layer.merged_adapters and not layer.base_layer.weight.requires_grad
        assert not layer._caches  # with what they hold, a compiled model would be looked at anew


def test_a_second_adapter_is_merged_into_what_was_there_first() -> None:
    """Both at once, or one after the other: the weight is rounded once."""
    net = adapted(tiny("int8"))
    net.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    net.base_model.set_adapter(["default", "second"])
    layer = layer_of(net)
    before = tensors(layer.base_layer.weight)
    net.merge_adapter()
    at_once = tensors(layer.base_layer.weight)
    net.unmerge_adapter()
    net.merge_adapter(adapter_names=["default"])
    with pytest.warns(UserWarning, match="Already following adapters were merged default"):
        net.merge_adapter(adapter_names=["second"])
    assert layer.merged_adapters == ["default", "second"]
    one_by_one = tensors(layer.base_layer.weight)
    assert all(torch.equal(at_once[name], one_by_one[name]) for name in before)
    net.unmerge_adapter()
    after = tensors(layer.base_layer.weight)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_after_an_error_nothing_has_changed() -> None:
    net = adapted(tiny("int8"))
    layer = layer_of(net)
    before = tensors(layer.base_layer.weight)
    layer.lora_B["default"].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaNs detected"):
        net.merge_adapter(safe_merge=True)
    after = tensors(layer.base_layer.weight)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not layer.merged_adapters
    with pytest.warns(UserWarning, match="Already unmerged"):
        layer.unmerge()


def test_an_adapter_that_is_gone_is_unmerged() -> None:
    net = adapted(tiny("int8"))
    layer = layer_of(net)
    before = tensors(layer.base_layer.weight)
    net.merge_adapter()
    layer.delete_adapter("default")
    layer.unmerge()
    after = tensors(layer.base_layer.weight)
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("safe", [False, True], ids=["", "safe"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("asked", ["mxfp4", "fp8_128x128", "kbit4", "quantize_model"])
def test_our_own_packed_layers_refuse(asked: str, dora: bool, safe: bool) -> None:
    """They say what to do instead, which merges; their codes stay."""
    model = Net()
    if asked == "quantize_model":
        kbit.quantize_model(model, 3, progress=False)
    else:
        inductor_q.quantize(model, asked, progress=False)
    net = adapted(model, target_modules=["up"], use_dora=dora)
    layer = net.base_model.model.up
    before = layer.base_layer.weight.clone()
    format = layer.base_layer.format
    with pytest.raises(
        exc.CannotMerge, match=rf"'default' .* {format}\. Decode .*dequantize_model"
    ):
        net.merge_adapter(safe_merge=safe)
    assert torch.equal(layer.base_layer.weight, before) and not layer.merged_adapters
    x = torch.randn(2, 64, dtype=BF16)
    with torch.no_grad():
        kbit.dequantize_model(net)
        expected = net(x)
        assert testing.relative_error(net.merge_and_unload()(x), expected) < 0.02


def test_torchaos_own_nf4_merges() -> None:
    """PEFT's layer over it is the one for ordinary weights."""
    torch.manual_seed(0)
    net: Any = torch.nn.Sequential(torch.nn.Linear(256, 256, dtype=BF16))
    inductor_q.quantize(net, {"torchao": {"format": "nf4"}}, progress=False)
    formats = packed(net)
    whole = adapted(net, target_modules=["0"], lora_bias=True)
    layer = whole.base_model.model[0]
    before = inductor_q.dequantize(layer.base_layer.weight), layer.base_layer.bias.clone()
    x = torch.randn(4, 256, dtype=BF16)
    with torch.no_grad():
        expected = whole(x)
        whole.merge_adapter()
        assert testing.relative_error(whole(x), expected) < 0.2
        assert not torch.equal(layer.base_layer.bias, before[1])
        whole.unmerge_adapter()
        assert torch.equal(inductor_q.dequantize(layer.base_layer.weight), before[0])
        assert torch.equal(layer.base_layer.bias, before[1])
        assert torch.equal(whole(x), expected)
        assert packed(whole.merge_and_unload()) == formats
