"""Models in k bits: which layers, what they compute, what is refused and left alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from inductor_q import exc, kbit, testing
from inductor_q.loading.layers import linear_layers
from tests.support.kbit_models import IDS, KBITS, LAYERS, Model, model, packed, quantized, unchanged

# --- one layer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("absmax", ["e4m4", "fp16"])
@pytest.mark.parametrize("k", KBITS)
def test_layer_computes_with_its_dequantized_weight(k: int, absmax: str) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(40, 24)
    layer = kbit.KBitLinear(kbit.quantize(plain.weight, k, absmax=absmax), plain.bias)
    x = torch.randn(3, 5, 40, requires_grad=True)
    y = layer(x)
    expected = nn.functional.linear(x, layer.dequantize(), plain.bias)
    torch.testing.assert_close(y, expected)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), x)
    torch.testing.assert_close(grad, expected_grad)
    assert layer.format == f"kbit{k}_{absmax}"
    assert repr(layer) == (
        f"KBitLinear(in_features=40, out_features=24, bias=True, kbit{k}_{absmax})"
    )


def test_layer_keeps_its_packed_dtypes() -> None:
    layer = kbit.KBitLinear(kbit.quantize(torch.randn(24, 40), 4, absmax="fp16"))
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    for cast in (layer.half, layer.bfloat16, layer.double, lambda: layer.to(torch.float16)):
        cast()
        for name, tensor in layer.state_dict().items():
            assert tensor.dtype == before[name].dtype
            assert torch.equal(tensor, before[name])
    assert layer.to("meta").codebook.is_meta


def test_layer_under_autocast() -> None:
    layer = kbit.KBitLinear(kbit.quantize(torch.randn(24, 40), 4))
    x = torch.randn(3, 40)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, layer(x.bfloat16()))
    assert layer(x).dtype == torch.float32


def test_a_linear_layer_by_itself() -> None:
    plain = nn.Linear(32, 8).eval()
    layer = kbit.quantize_model(plain, 4, progress=False)
    assert isinstance(layer, kbit.KBitLinear)
    assert layer.bias is plain.bias
    assert not layer.training
    back = kbit.dequantize_model(layer)
    assert type(back) is nn.Linear
    assert torch.equal(back.weight, layer.dequantize())


# --- which layers -------------------------------------------------------------------------------


def test_default_layers() -> None:
    m = quantized()
    assert list(packed(m)) == LAYERS
    assert type(m.lm_head) is nn.Linear
    every = kbit.quantize_model(model(), 3, skip=[], progress=False)
    assert list(packed(every)) == [*LAYERS, "lm_head"]


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        (["up"], ["layers.0.down", "layers.1.down", "lm_head"]),
        (["layers.0.*", "lm_head"], ["layers.1.up", "layers.1.down"]),
        (["*.1.down", "layers.0.up"], ["layers.0.down", "layers.1.up", "lm_head"]),
    ],
)
def test_skip(skip: list[str], left: list[str]) -> None:
    assert list(packed(kbit.quantize_model(model(), 3, skip=skip, progress=False))) == left


def test_skip_that_matches_nothing() -> None:
    m = model()

    def call() -> None:
        with pytest.raises(exc.UnknownLayer, match="no linear layer matches 'lm_haed' in skip"):
            kbit.quantize_model(m, 3, skip=["up", "lm_haed"], progress=False)

    unchanged(m, call)


def test_tied_weights_are_left_alone() -> None:
    m = kbit.quantize_model(model(tied=True), 3, skip=[], progress=False)
    assert list(packed(m)) == LAYERS
    assert m.get_parameter("lm_head.weight") is m.get_parameter("embed.weight")


def test_a_layer_under_two_names_is_one_layer() -> None:
    shared = nn.Linear(32, 32)
    m = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(32, 32))
    kbit.quantize_model(m, 4, progress=False)
    assert isinstance(m[0], kbit.KBitLinear)
    assert m[0] is m[2]
    assert m[0] is not m[3]


def test_k_by_layer() -> None:
    m = kbit.quantize_model(model(), {"layers.0.up": 2, "layers.1.down": 5}, progress=False)
    assert {name: layer.format for name, layer in packed(m).items()} == {
        "layers.0.up": "kbit2_e4m4",
        "layers.1.down": "kbit5_e4m4",
    }


def test_values_are_those_of_quantize_and_dequantize() -> None:
    plain, m = model(), quantized(4)
    for name, layer in packed(m).items():
        weight = plain.get_parameter(f"{name}.weight")
        assert torch.equal(layer.dequantize(), kbit.dequantize(kbit.quantize(weight, 4)))
    expected = m(IDS)
    back = kbit.dequantize_model(m)
    assert not packed(back)
    # A CPU without products in bfloat16 adds those of a packed layer up in another order.
    assert testing.relative_error(back(IDS), expected.double()) < 0.01


# --- what is refused, and what is left then -----------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"k": 6}, exc.UnsupportedBits),
        ({"k": {"layers.0.up": 3, "layers.0.pu": 3}}, exc.UnknownLayer),
        ({"k": {"layers.0.up": 3, "layers.0.down": 1}}, exc.UnsupportedBits),
        ({"k": 3, "absmax": "fp8"}, exc.UnknownAbsmax),
        ({"k": 3, "codebook": torch.linspace(-1, 1, 16)}, exc.WrongCodebook),
        ({"bits": 3.5, "codebook": torch.linspace(-1, 1, 16)}, exc.WrongCodebook),
        ({"bits": 2.0}, exc.WrongBudget),
        ({"bits": 5.3}, exc.WrongBudget),
        ({"bits": 3.5, "importance": {"layers.0.pu": 2.0}}, exc.UnknownLayer),
        ({"k": 3, "bits": 3.5}, TypeError),
        ({"k": 3, "importance": {"layers.0.up": 2.0}}, TypeError),
        ({}, TypeError),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], kind: type[Exception]) -> None:
    m = model()

    def call() -> None:
        with pytest.raises(kind):
            kbit.quantize_model(m, progress=False, **arguments)

    unchanged(m, call)


@pytest.mark.parametrize("bits", [None, 3.5])
def test_a_bad_weight_is_named_and_nothing_is_replaced(bits: float | None) -> None:
    for value, kind in ((math.nan, exc.NotFinite), (40.0, exc.ScaleOutOfRange)):
        m = model()
        with torch.no_grad():
            m.get_parameter("layers.1.down.weight")[3, 5] = value

        def call(m: Model = m, kind: type[exc.QfuseError] = kind) -> None:
            with pytest.raises(kind, match=r"weight of layers\.1\.down "):
                kbit.quantize_model(m, None if bits else 3, bits=bits, progress=False)

        unchanged(m, call)


def test_state_dict_of_another_format() -> None:
    m = quantized(4)
    for other, found in ((quantized(3), "kbit3_e4m4"), (quantized(4, "fp16"), "kbit4_fp16")):
        with pytest.raises(exc.CorruptQuantState) as error:
            m.load_state_dict(other.state_dict())
        assert str(error.value) == (
            "corrupt quantization state: format of layers.0.up should be kbit4_e4m4, is "
            f"{found}. Quantize the model with the k and absmax of the state dict."
        )


def test_state_dict_of_a_corrupt_length() -> None:
    m = quantized(4)
    state = m.state_dict()
    state["layers.0.up.qweight"] = state["layers.0.up.qweight"][:-1]
    with pytest.raises(exc.CorruptQuantState) as error:
        m.load_state_dict(state)
    assert str(error.value) == (
        "corrupt quantization state: layers.0.up.qweight should be torch.int32 (256,), is "
        "torch.int32 (255,). The state dict belongs to a layer of another size, or is damaged."
    )


# --- what is packed already, or was never there -------------------------------------------------


def refused(m: nn.Module, found: str, k: int = 4, **arguments: Any) -> None:
    with pytest.raises(exc.NothingToQuantize, match=found):
        kbit.quantize_model(m, k, progress=False, **arguments)


def test_a_model_that_bitsandbytes_has_packed() -> None:
    m = testing.qlora_model(testing.tiny_llama_config(num_hidden_layers=1))
    assert type(m.get_submodule("base_model.model.lm_head")) is nn.Linear  # skipped by default
    refused(m, r"in PeftModel\w*: it is packed already, 7 Linear4bit \(.*q_proj.*, \.\.\.\)")


def test_a_model_in_another_k() -> None:
    m = quantized(4)
    refused(m, "4 KBitLinear .*dequantize_model", k=3)
    assert {layer.format for layer in packed(m).values()} == {"kbit4_e4m4"}
    back = kbit.quantize_model(kbit.dequantize_model(m), 3, progress=False)
    assert {layer.format for layer in packed(back).values()} == {"kbit3_e4m4"}


def test_a_model_of_torchao() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    m = nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16))
    quantization.quantize_(m, quantization.Int8WeightOnlyConfig(set_inductor_config=False))
    refused(m, "in Sequential: it is packed already, 1 Linear of Int8Tensor")


def test_a_model_without_linear_layers() -> None:
    refused(nn.Sequential(nn.Conv1d(2, 2, 2)), "in Sequential: it has no nn.Linear$")
    refused(nn.Sequential(nn.Linear(32, 32)), r"none of its nn.Linear layers \(1\)", skip=["*"])


def test_what_stays_packed_is_told(told: list[str]) -> None:
    m = kbit.quantize_model(model(), {"layers.0.up": 2}, progress=False)
    kbit.quantize_model(m, {"layers.0.down": 3}, progress=False)
    assert not told  # each layer was named
    kbit.quantize_model(m, 4, progress=False)
    assert told == ["left as they are, packed already: 2 KBitLinear (layers.0.up, layers.0.down)"]
    assert [layer.format[:5] for layer in packed(m).values()] == [
        "kbit2",
        "kbit3",
        "kbit4",
        "kbit4",
    ]


def test_a_quantized_checkpoint(tmp_path: Path) -> None:
    """An fp8 checkpoint has weights in the shapes of the model's, and scales beside them."""
    torch_file: Any = pytest.importorskip("safetensors.torch")
    m = model()
    codes = {n: t.detach().to(torch.float8_e4m3fn).clone() for n, t in m.state_dict().items()}
    torch_file.save_file(codes, tmp_path / "model.safetensors")
    said = {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(said))

    def call() -> None:
        with pytest.raises(exc.AlreadyQuantized, match="quant_method='fp8'"):
            kbit.quantize_model(m, 4, checkpoint=tmp_path, progress=False)

    unchanged(m, call)


def test_adapters_are_no_layers_to_quantize() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["up"])
    wrapped = peft.get_peft_model(model(), config)
    assert [name.rpartition("model.")[2] for name in linear_layers(wrapped)] == [
        "layers.0.up.base_layer",
        "layers.0.down",
        "layers.1.up.base_layer",
        "layers.1.down",
        "lm_head",
    ]


@pytest.mark.parametrize(
    "lora", [{"target_modules": ["up", "lm_head"]}, {"target_modules": ["up"]}]
)
def test_skip_takes_names_without_the_parts_that_peft_adds(lora: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(model(), peft.LoraConfig(r=4, **lora))
    kbit.quantize_model(wrapped, 4, skip=["layers.0.up", "lm_head"], progress=False)
    assert [name.removeprefix("base_model.model.") for name in packed(wrapped)] == [
        "layers.0.down",
        "layers.1.up.base_layer",
        "layers.1.down",
    ]
    wrapped = peft.get_peft_model(model(), peft.LoraConfig(r=4, **lora))
    kbit.quantize_model(wrapped, 4, progress=False)
    assert not [name for name in packed(wrapped) if "lm_head" in name]  # the default


def test_what_trains_in_a_model_of_peft_is_left() -> None:
    """Copies of `modules_to_save` train, also those of an adapter that is loaded only to run, and
    so does the encoder of p-tuning."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = peft.LoraConfig(r=4, target_modules=["up"], modules_to_save=["down"])
    prompts = peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=32
    )
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 40}
    llama = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    for wrapped in (
        peft.get_peft_model(model(), config),
        peft.get_peft_model(transformers.LlamaForCausalLM(llama), prompts),
    ):
        before = {n for n, p in wrapped.named_parameters() if p.requires_grad}
        wrapped = kbit.quantize_model(wrapped, 4, progress=False)
        assert packed(wrapped)
        assert {n for n, p in wrapped.named_parameters() if p.requires_grad} == before
    run_only = peft.get_peft_model(model(), config).requires_grad_(False)
    assert not [name for name in linear_layers(run_only) if "modules_to_save" in name]
