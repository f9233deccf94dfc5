"""PEFT's merges into packed weights: ours where the layer below is ours, PEFT's own elsewhere."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import inductor_q
from inductor_q import exc, kbit, testing
from inductor_q.loading.merged_values import KEPT
from inductor_q.loading.merges import _AROUND, mend_merges
from inductor_q.log import warn_once
from tests.support.merged import merged_by_hand
from tests.support.quantized_nets import BF16, Net, packed, tiny

peft: Any = pytest.importorskip("peft")
torchao: Any = pytest.importorskip("torchao.quantization")
transformers: Any = pytest.importorskip("transformers")


def put_back() -> None:
    import peft.tuners.lora.torchao as library

    for kind in (peft.tuners.lora.layer.Linear, library.TorchaoLoraLinear):
        for name in ("merge", "unmerge"):
            setattr(kind, name, inspect.unwrap(vars(kind)[name]))
    of_parameters = peft.tuners.lora.layer.ParamWrapper
    of_parameters.merge = inspect.unwrap(of_parameters.merge)
    whole = peft.tuners.tuners_utils.BaseTuner
    for name in _AROUND:
        setattr(whole, name, inspect.unwrap(vars(whole)[name]))
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


def packed_net(asked: str) -> Any:
    model = Net()
    if asked == "quantize_model":
        return kbit.quantize_model(model, 3, progress=False)
    return inductor_q.quantize(model, asked, progress=False)


def assert_rounded_once(merged: torch.Tensor, expected: torch.Tensor) -> None:
    """`merged` is off by half of its last bit, and by what float32 leaves where terms cancel."""
    assert merged.dtype is BF16
    error = (merged.double() - expected).abs()
    assert (error <= 2**-8 * 1.001 * expected.abs() + 1e-6).all()


@pytest.mark.parametrize("safe", [False, True], ids=["", "safe"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("asked", ["mxfp4", "fp8_128x128", "nvfp4_rows", "kbit4", "quantize_model"])
def test_a_packed_layer_is_an_ordinary_one_while_adapters_are_merged(
    asked: str, dora: bool, safe: bool, told: list[str]
) -> None:
    """Of the values with the adapter, rounded once; unmerging puts back the layer that was there,
    with the same codes."""
    warn_once.cache_clear()
    net = adapted(
        packed_net(asked), target_modules=["up"], use_dora=dora, lora_bias=not dora, use_rslora=True
    )
    layer = net.base_model.model.up
    below, bias = layer.base_layer, layer.base_layer.bias.clone()
    before = {name: tensor.clone() for name, tensor in below.state_dict().items()}
    for part in (layer.lora_A, layer.lora_B):
        part.to(BF16)  # their product is not rounded all the same
    if dora:
        magnitude = layer.lora_magnitude_vector["default"].weight
        magnitude.data *= torch.linspace(0.5, 2, magnitude.numel(), dtype=magnitude.dtype)
    expected = merged_by_hand(layer, below.dequantize(torch.float32), dora=dora)
    x = torch.randn(2, 64, dtype=BF16)
    with torch.no_grad():
        output = net(x)
        for _ in range(2):
            net.merge_adapter(safe_merge=safe)
            assert (
                type(layer.base_layer) is torch.nn.Linear
                and layer.lora_A.default.weight.dtype is BF16
            )
            assert_rounded_once(layer.base_layer.weight, expected)
            if not dora:
                shift = layer.scaling["default"] * layer.lora_B["default"].bias.double()
                assert_rounded_once(layer.base_layer.bias, bias.double() + shift)
            assert testing.relative_error(net(x), output) < 0.02
            net.unmerge_adapter()
            assert layer.base_layer is below and not layer.merged_adapters and not layer._caches
            assert all(torch.equal(below.state_dict()[name], before[name]) for name in before)
            assert torch.equal(net(x), output)
        merged = net.merge_and_unload(safe_merge=safe)
    assert type(merged.up) is torch.nn.Linear and type(merged.down) is type(below)
    assert_rounded_once(merged.up.weight, expected)
    assert testing.relative_error(merged(x), output) < 0.02
    [message] = told
    assert f"torch.bfloat16 takes 2 bytes an element, more than {below.format} did" in message


def test_adapters_merge_into_a_packed_layer_at_once_or_one_by_one() -> None:
    net = adapted(packed_net("mxfp4"), target_modules=["up"])
    second = peft.LoraConfig(r=2, target_modules=["up"], use_dora=True, init_lora_weights=False)
    net.add_adapter("second", second)
    net.base_model.set_adapter(["default", "second"])
    layer = net.base_model.model.up
    below, x = layer.base_layer, torch.randn(2, 64, dtype=BF16)
    with torch.no_grad():
        output = net(x)
        net.merge_adapter()
        at_once = layer.base_layer.weight
        assert testing.relative_error(net(x), output) < 0.02
        net.unmerge_adapter()
        net.merge_adapter(adapter_names=["default"])
        with pytest.warns(UserWarning, match="Already following adapters were merged default"):
            net.merge_adapter(adapter_names=["second"])
    assert layer.merged_adapters == ["default", "second"]
    assert torch.equal(layer.base_layer.weight, at_once)
    with pytest.warns(UserWarning, match="All adapters are already merged"):
        net.merge_adapter()
    with net.disable_adapter():  # PEFT unmerges then
        net(x)
    assert layer.base_layer is below and torch.equal(net(x), output)


def test_a_packed_layer_stays_after_an_error() -> None:
    net = adapted(packed_net("mxfp4"), target_modules=["up"], lora_bias=True)
    layer = net.base_model.model.up
    below, parameters = layer.base_layer, dict(layer.named_parameters())
    bias = below.bias.clone()
    layer.lora_B["default"].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaNs detected"):
        net.merge_adapter(safe_merge=True)
    assert layer.base_layer is below and torch.equal(below.bias, bias)
    assert all(p is parameters[name] for name, p in layer.named_parameters())
    assert not layer.merged_adapters and not layer._caches


def test_a_copy_of_a_merged_model_is_unmerged_by_itself() -> None:
    net = adapted(packed_net("mxfp4"), target_modules=["up"])
    net.merge_adapter()
    copied = copy.deepcopy(net)
    copied.unmerge_adapter()
    layers = [whole.base_model.model.up for whole in (net, copied)]
    assert [layer.merged for layer in layers] == [True, False]
    net.unmerge_adapter()
    codes = [layer.base_layer.weight for layer in layers]
    assert torch.equal(*codes) and codes[0] is not codes[1]


def test_the_warning_is_said_once_a_format(told: list[str]) -> None:
    """For layers of any size: the codebook is a larger part of a small one."""
    warn_once.cache_clear()
    net: Any = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1024)).to(BF16)
    kbit.quantize_model(net, 4, progress=False)
    adapted(net, target_modules=["0", "1"]).merge_adapter()
    assert len(told) == 1


def prepared(net: Any) -> Any:
    return peft.prepare_model_for_kbit_training(net, use_gradient_checkpointing=False)


#: How a model is cast after it has been packed, and the dtype of its layers' inputs then.
CASTS: dict[str, tuple[Callable[[Any], Any], torch.dtype]] = {
    "to": (lambda net: net.to(torch.float16), torch.float16),
    "float": (lambda net: net.float(), torch.float32),
    "prepare_model_for_kbit_training": (prepared, torch.float32),
}


@pytest.mark.parametrize("how", CASTS)
@pytest.mark.parametrize("packed_by", ["mxfp4", "quantize_model"])
@pytest.mark.parametrize("adapted_first", [False, True], ids=["", "adapted_first"])
def test_a_model_that_was_cast_runs_once_merged_or_decoded(
    how: str, packed_by: str, adapted_first: bool
) -> None:
    """Packed layers compute in any dtype; ordinary ones have that of their inputs."""
    cast, dtype = CASTS[how]
    torch.manual_seed(0)
    config = transformers.Qwen2Config(  # which has biases
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 64},
        **{"num_attention_heads": 2, "num_key_value_heads": 2},
    )
    net = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16)
    if packed_by == "quantize_model":
        kbit.quantize_model(net, 4, progress=False)
    else:
        inductor_q.quantize(net, packed_by, progress=False)
    net = cast(adapted(net)) if adapted_first else adapted(cast(net))
    layer, ids = layer_of(net), torch.arange(8).view(1, 8)
    with torch.no_grad():
        output = net(ids).logits
        plain: Any = kbit.dequantize_model(copy.deepcopy(net))
        assert layer_of(plain).base_layer.weight.dtype is dtype
        assert testing.relative_error(plain(ids).logits, output) < 0.02
        bias = layer.base_layer.bias.clone()
        net.merge_adapter()
        assert layer.base_layer.weight.dtype is layer.base_layer.bias.dtype is dtype
        assert testing.relative_error(net(ids).logits, output) < 0.02
        net.unmerge_adapter()
        assert torch.equal(layer.base_layer.bias, bias) and torch.equal(net(ids).logits, output)
        merged = net.merge_and_unload()
        assert testing.relative_error(merged(ids).logits, output) < 0.02


def test_casts_do_not_stop_at_packed_layers() -> None:
    layer = packed_net("mxfp4").up
    assert layer.to("meta").dtype is BF16 and layer.to_empty(device="cpu").dtype is BF16
    assert layer.half().share_memory().dtype is layer.decoded().bias.dtype is torch.float16
    assert layer.decoded().bias is layer.bias


def test_a_bias_in_float32_comes_back() -> None:
    """PEFT adds to a bias in its place."""
    net = adapted(packed_net("mxfp4").float(), target_modules=["up"], lora_bias=True)
    bias = net.base_model.model.up.base_layer.bias
    before = bias.clone()
    for _ in range(2):
        net.merge_adapter()
        assert not torch.equal(bias, before)
        net.unmerge_adapter()
        assert torch.equal(bias, before)


@pytest.mark.parametrize("asked", ["mxfp4", "int8"])
def test_what_is_merged_for_inference_trains_later(asked: str) -> None:
    with_bias = asked == "mxfp4"  # PEFT's adapters of torchao's weights have none
    net = adapted(packed_net(asked), target_modules=["up"], lora_bias=with_bias)
    layer = net.base_model.model.up
    with torch.inference_mode():
        net.merge_adapter()
    assert not any(t.is_inference() for t in (layer.base_layer.weight, layer.base_layer.bias))
    with torch.inference_mode():
        net.unmerge_adapter()
    assert not any(t.is_inference() for t in layer.base_layer.parameters())
    net(torch.randn(2, 64, dtype=BF16)).sum().backward()


@pytest.mark.parametrize("asked", ["mxfp4", "int8"])
def test_autocast_does_not_round_what_is_merged(asked: str) -> None:
    nets = [adapted(packed_net(asked).float(), target_modules=["up"]) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    nets[0].merge_adapter()
    with torch.autocast("cpu", BF16):
        nets[1].merge_adapter()
    weights = [inductor_q.dequantize(net.base_model.model.up.base_layer.weight) for net in nets]
    assert torch.equal(*weights)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("asked", ["mxfp4", "int8"])
def test_nothing_packed_comes_back_into_a_decoded_model(asked: str, dora: bool) -> None:
    net = adapted(packed_net(asked), target_modules=["up"], use_dora=dora)
    layer, x = net.base_model.model.up, torch.randn(2, 64, dtype=BF16)
    with torch.no_grad():
        output = net(x)
        net.merge_adapter()
        kbit.dequantize_model(net)
        assert KEPT not in layer._caches
        close = 0.02 if asked == "mxfp4" else 0.05  # the sum has been packed again
        for act in (net.unmerge_adapter, net.merge_adapter):
            act()
            assert testing.relative_error(net(x), output) < close
            assert type(layer.base_layer) is torch.nn.Linear and not packed(net)


@pytest.mark.parametrize("asked", ["mxfp4", "int8"])
def test_what_happens_to_a_merged_model_stays(asked: str) -> None:
    """Its mode, the dtype of a cast, and what a bias has learned, in the optimizer's parameter."""
    more: Any = {"target_modules": ["up"], "lora_bias": asked == "mxfp4"}
    net = adapted(packed_net(asked), **more, bias="all").train()
    net.add_adapter("second", peft.LoraConfig(r=2, **more, init_lora_weights=False))
    layer = net.base_model.model.up
    bias = layer.base_layer.bias
    before = bias.detach().clone()
    assert bias.requires_grad
    for name in ("default", "second"):
        net.merge_adapter(adapter_names=[name])
        assert layer.base_layer.bias is bias
        with torch.no_grad():
            bias[:64] += 1
    bias.requires_grad_(False)
    net.eval()
    if asked == "mxfp4":
        net.float()
    net.unmerge_adapter()
    base = layer.base_layer
    assert base.bias is bias and not bias.requires_grad and not base.training
    assert torch.equal(bias[64:], before[64:].to(bias.dtype))
    assert torch.allclose(bias[:64].float(), before[:64].float() + 2, atol=0.05)
    dtype = torch.float32 if asked == "mxfp4" else BF16
    assert bias.dtype is dtype is base.weight.dtype or base.dtype is dtype


@pytest.mark.parametrize("beside", [None, "nf4", "int8"])
def test_transformers_loads_a_model_that_packed_layers_were_merged_in(
    beside: str | None, tmp_path: Any
) -> None:
    """Beside layers that a library has packed too: its configuration leaves the merged ones out."""
    net = tiny("mxfp4", skip=["lm_head", "*.mlp.*"] if beside else ["lm_head"])
    if beside:
        inductor_q.quantize(net, beside, progress=False)
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    whole = adapted(net, target_modules=names if beside else "all-linear", use_dora=not beside)
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        expected = whole(ids).logits
        merged = whole.merge_and_unload()
        logits = merged(ids).logits
        assert testing.relative_error(logits, expected) < 0.02
        merged.save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16)
        assert hasattr(loaded.config, "quantization_config") is bool(beside)
        assert packed(loaded) == packed(merged) and bool(packed(loaded)) is bool(beside)
        layers = [whole.model.layers[0].self_attn.q_proj for whole in (merged, loaded)]
        assert torch.equal(*(layer.weight for layer in layers))
        close = 0.01 if beside else 1e-6  # bitsandbytes multiplies in other steps
        assert testing.relative_error(loaded(ids).logits, logits) < close


def test_layers_that_no_adapter_is_merged_into_stay_packed(tmp_path: Any) -> None:
    merged = adapted(tiny("mxfp4"), target_modules=["q_proj"]).merge_and_unload()
    layer = merged.model.layers[0].self_attn
    assert type(layer.q_proj) is torch.nn.Linear and layer.k_proj.format == "mxfp4"
    with pytest.raises(exc.CannotSave, match=r"mlp|k_proj|o_proj|v_proj"):
        merged.save_pretrained(tmp_path)


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
