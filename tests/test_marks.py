"""Models that `inductor_q.quantize` marks: adapters merge, and what is saved is loaded again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import inductor_q
from inductor_q import exc, kbit, testing
from tests.support.merged import merged_by_hand
from tests.support.processes import environment
from tests.support.quantized_nets import BF16, Net, packed, tiny

torchao: Any = pytest.importorskip("torchao.quantization")
transformers: Any = pytest.importorskip("transformers")


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("asked", ["nf4", "fp4", "llm_int8"])
def test_an_adapter_merges(asked: str, dora: bool) -> None:
    """PEFT takes its layers of bitsandbytes, which decode the weight, add, and pack it again."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = testing.tiny_qwen3_config(num_hidden_layers=1)
    base = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16).eval()
    inductor_q.quantize(base, asked, progress=False)
    settings = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    adapted = peft.get_peft_model(base, peft.LoraConfig(**settings, use_dora=dora)).eval()
    kind = "Linear8bitLt" if asked == "llm_int8" else "Linear4bit"
    adapted_layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    assert type(adapted_layer).__module__ == "peft.tuners.lora.bnb"
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        expected = adapted(ids).logits
        merged = adapted.merge_and_unload()
        assert type(merged.model.layers[0].self_attn.q_proj).__name__ == kind
        assert testing.relative_error(merged(ids).logits, expected) < 0.3  # packed once more


OF_TORCHAO = ["int8", "int8_tensor", "int8_g32", "fp8_row", "fp8_e5m2_tensor", "nvfp4"]


def adapted(model: Any, **more: Any) -> Any:
    peft = pytest.importorskip("peft")
    settings = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(**settings, **more)).eval()


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("asked", OF_TORCHAO)
def test_an_adapter_merges_into_weights_of_torchao(asked: str, dora: bool) -> None:
    """The merged weight is that of the decoded one, packed once more by torchao; unmerging that
    takes the adapter out again."""
    net = adapted(tiny(asked), use_dora=dora)
    layer = net.base_model.model.model.layers[0].self_attn.q_proj
    assert type(layer).__name__ == "TorchaoLoraLinear"
    if dora:  # as trained: PEFT starts with the norms, which change nothing
        magnitude = layer.lora_magnitude_vector["default"].weight
        magnitude.data *= torch.linspace(0.5, 2, magnitude.numel(), dtype=magnitude.dtype)
    before = inductor_q.dequantize(layer.base_layer.weight)
    expected = merged_by_hand(layer, before, dora=dora)
    again = nn.Linear(expected.shape[1], expected.shape[0], bias=False)
    again.weight = nn.Parameter(expected.to(BF16))
    layer_again: Any = inductor_q.quantize(again, asked, progress=False)
    step = testing.relative_error(inductor_q.dequantize(layer_again.weight), expected)
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        logits = net(ids).logits
        net.merge_adapter(safe_merge=True)
        merged = inductor_q.dequantize(layer.base_layer.weight)
        # The codes of few numbers differ from those by hand, where bfloat16 rounds in other steps.
        assert testing.relative_error(merged, expected) < 1.1 * step < 0.2
        assert testing.relative_error(net(ids).logits, logits) < 0.2
        net.unmerge_adapter()
        assert testing.relative_error(net(ids).logits, logits) < 0.2
        after = inductor_q.dequantize(layer.base_layer.weight)
        scale = expected.norm() / before.double().norm()
        assert testing.relative_error(after, before) < 4 * step * scale
        whole = net.merge_and_unload()
    assert type(whole.model.layers[0].self_attn.q_proj.weight) is type(layer.base_layer.weight)
    assert testing.relative_error(whole(ids).logits, logits) < 0.2


def test_two_adapters_merge_one_after_the_other() -> None:
    """A plain one and one of DoRA's, of which PEFT takes the norms from the weight below both."""
    peft = pytest.importorskip("peft")
    net = adapted(tiny("int8"))
    settings = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}
    net.add_adapter("second", peft.LoraConfig(**settings, use_dora=True))
    layer = net.base_model.model.model.layers[0].self_attn.q_proj
    before = inductor_q.dequantize(layer.base_layer.weight)
    net.base_model.set_adapter(["default", "second"])
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        logits = net(ids).logits
        net.merge_adapter()
        assert layer.merged_adapters == ["default", "second"]
        assert testing.relative_error(net(ids).logits, logits) < 0.05
        net.unmerge_adapter()
    assert testing.relative_error(inductor_q.dequantize(layer.base_layer.weight), before) < 0.1


def test_weights_in_two_formats_of_torchao(tmp_path: Path) -> None:
    """Each is packed again as it was, and `from_pretrained` loads both."""
    net = tiny("int8", skip=["lm_head", "k_proj"])
    inductor_q.quantize(net, "fp8_row", progress=False)
    formats = packed(net)
    assert {*formats.values()} == {"int8_row", "fp8_e4m3_row"}
    net.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16)
    assert packed(loaded) == formats
    whole = adapted(net)
    with torch.no_grad():
        whole.merge_adapter()
        assert packed(whole.merge_and_unload()) == formats


@pytest.mark.parametrize("asked", [("nf4", "int8"), ("int8", "nf4")], ids="-then-".join)
def test_weights_of_two_libraries(
    asked: tuple[str, str], default_options: None, told: list[str], tmp_path: Path
) -> None:
    """Adapters merge into both. No config.json describes them: saving is an error that says so."""
    net = tiny(asked[0], skip=["lm_head", "*.mlp.*"])
    inductor_q.quantize(net, asked[1], progress=False)
    assert any("save_pretrained cannot write this model" in message for message in told)
    assert not hasattr(net.config, "quantization_config")
    with pytest.raises(exc.CannotSave, match=r"Qwen3ForCausalLM .* several libraries"):
        net.save_pretrained(tmp_path)
    whole = adapted(net)
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        logits = whole(ids).logits
        whole.merge_adapter()
        assert testing.relative_error(whole(ids).logits, logits) < 0.3
    kbit.dequantize_model(net)  # torchao's alone
    with pytest.raises(exc.CannotSave):
        net.save_pretrained(tmp_path)


def test_weights_of_bitsandbytes_in_4_and_8_bits(default_options: None, told: list[str]) -> None:
    net = tiny("nf4", skip=["lm_head", "*.mlp.*"])
    inductor_q.quantize(net, "llm_int8", progress=False)
    assert any("in 4 and 8 bits" in message for message in told)
    assert not hasattr(net.config, "quantization_config")


def test_a_part_of_a_model() -> None:
    """Adapters of the whole model merge into the part that was quantized."""
    config = testing.tiny_qwen3_config(num_hidden_layers=1)
    whole = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16).eval()
    inductor_q.quantize(whole.model, "int8", progress=False)
    with pytest.warns(UserWarning, match="get_apply_tensor_subclass"):  # PEFT asks the whole one
        net = adapted(whole)
    formats = packed(net)
    net.merge_adapter()
    assert packed(net) == formats


def test_a_plain_module_gets_no_mark() -> None:
    """Nothing of transformers is put on it, and it is decoded as any other."""
    net: Any = inductor_q.quantize(Net(), "int8", progress=False)
    assert not hasattr(net, "hf_quantizer")
    values = inductor_q.dequantize(net.up.weight)
    plain: Any = kbit.dequantize_model(net)
    assert plain is net and not packed(net) and torch.equal(net.up.weight, values)


def test_what_somebody_else_marked_without_a_configuration() -> None:
    net: Any = inductor_q.quantize(Net(), "int8", progress=False)
    net.hf_quantizer = tiny("int8").hf_quantizer
    kbit.dequantize_model(net)
    assert not hasattr(net, "hf_quantizer") and not packed(net)


def test_quantizing_a_plain_module_imports_neither_peft_nor_transformers() -> None:
    """PEFT's layers are mended when it is imported."""
    program = """
import sys, torch, inductor_q
before = {"peft", "transformers"} & {*sys.modules}
net = inductor_q.quantize(torch.nn.Sequential(torch.nn.Linear(64, 64)), "int8")
assert {"peft", "transformers"} & {*sys.modules} == before == set()
import peft
whole = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["0"], use_dora=True))
layer = whole.base_model.model[0]
layer.lora_magnitude_vector["default"].weight.data *= 2
values = inductor_q.dequantize(layer.base_layer.weight)
whole.merge_adapter()
merged = inductor_q.dequantize(layer.base_layer.weight)
assert (merged - 2 * values).norm() < 0.02 * merged.norm()
"""
    run = [sys.executable, "-W", "ignore", "-c", program]
    subprocess.run(run, env=environment(), check=True)


@pytest.mark.parametrize("asked", OF_TORCHAO)
def test_transformers_loads_what_it_saves_of_torchao(asked: str, tmp_path: Path) -> None:
    model = tiny(asked)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16)
    assert packed(loaded) == packed(model) and "lm_head" not in packed(model)
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("asked", OF_TORCHAO)
def test_weights_of_torchao_are_decoded(asked: str, tmp_path: Path) -> None:
    """One by one, bitwise as by torchao; and all of a model, which then is as any other."""
    model: Any = tiny(asked)
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert torch.equal(inductor_q.dequantize(weight), weight.dequantize())
    values = inductor_q.dequantize(weight, dtype=torch.float32)
    assert torch.equal(values.to(BF16), weight.dequantize())
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        expected = model(ids).logits
        plain: Any = kbit.dequantize_model(model)
        assert plain is model and not packed(plain)
        assert torch.equal(plain.model.layers[0].self_attn.q_proj.weight, weight.dequantize())
        assert testing.relative_error(plain(ids).logits, expected) < 0.02
        plain.save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16)
        assert torch.equal(loaded(ids).logits, plain(ids).logits)


@pytest.mark.parametrize("asked", ["nvfp4", "mxfp4", "fp8_128x128"])
def test_an_adapter_merges_exactly_into_decoded_weights(asked: str) -> None:
    """DoRA's, whose norms PEFT takes of the packed weight."""
    net = adapted(tiny(asked), use_dora=True)
    kbit.dequantize_model(net)
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        expected = net(ids).logits
        assert testing.relative_error(net.merge_and_unload()(ids).logits, expected) < 0.02


def test_a_weight_of_torchao_that_no_format_describes() -> None:
    config = torchao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    torchao.quantize_(net := Net(), config)
    with pytest.raises(exc.UnreadWeight, match="Int8Tensor: torchao quantizes its input as well"):
        inductor_q.dequantize(net.up.weight)
    with pytest.raises(exc.UnreadWeight):
        kbit.dequantize_model(net)
    assert type(net.up.weight).__name__ == "Int8Tensor"


NF4_TENSOR = {"torchao": {"format": "nf4"}}


def of_nf4_tensors(seed: int = 0) -> Any:
    """torchao packs what fills its scales of scales, in bfloat16."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    torch.manual_seed(seed)
    config = testing.tiny_qwen3_config(num_hidden_layers=1, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16).eval()
    return inductor_q.quantize(model, NF4_TENSOR, progress=False)


def test_torchaos_own_nf4() -> None:
    """It is no format of bitsandbytes'. PEFT trains adapters on it, which merge into its values."""
    model = of_nf4_tensors()
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert type(weight).__name__ == "NF4Tensor" and {*packed(model).values()} == {"nf4_tensor_b64"}
    assert torch.equal(inductor_q.dequantize(weight), weight.get_original_weight())
    net = adapted(model)
    ids = torch.arange(8).view(1, 8)
    net(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in net.parameters() if p.requires_grad)
    kbit.dequantize_model(net)
    with torch.no_grad():
        expected = net(ids).logits
        assert testing.relative_error(net.merge_and_unload()(ids).logits, expected) < 0.02
    with pytest.raises(exc.WrongScheme, match="torchao does not take the weight of up"):
        inductor_q.quantize(Net(), NF4_TENSOR, progress=False)


def test_torchaos_own_nf4_is_saved_by_torch(
    default_options: None, told: list[str], tmp_path: Path
) -> None:
    """torchao has no form of it for safetensors: an error before a file is written names the first
    weight and what does write it, and so does the warning when it is packed."""
    model = of_nf4_tensors()
    assert any("cannot write this model: torchao does not write" in text for text in told)
    said = r"q_proj\.weight cannot .* NF4Tensor to safetensors\. Write it by torch\.save"
    with pytest.raises(exc.CannotSave, match=said):
        model.save_pretrained(tmp_path)
    with pytest.raises(exc.CannotSave, match=r"q_proj\.weight .* does: torch\.save$"):
        kbit.save(model, tmp_path / "model.safetensors")
    assert not [*tmp_path.iterdir()]
    ids = torch.arange(8).view(1, 8)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    again = of_nf4_tensors(seed=1)
    with torch.no_grad():
        assert not torch.equal(again(ids).logits, model(ids).logits)
        again.load_state_dict(torch.load(tmp_path / "model.pt"))
        assert torch.equal(again(ids).logits, model(ids).logits)
    adapted(model).save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    kbit.dequantize_model(model)
    model.save_pretrained(tmp_path / "plain")


def test_other_weights_of_torchao_are_saved_by_transformers(tmp_path: Path) -> None:
    with pytest.raises(exc.CannotSave, match=r"does: save_pretrained, torch\.save"):
        kbit.save(tiny("int8"), tmp_path / "model.safetensors")


@pytest.mark.parametrize("asked", ["nf4", "fp4_b128", "llm_int8"])
def test_what_save_pretrained_writes_is_loaded(asked: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    skip = ["lm_head", "model.layers.1.mlp.*"]
    inductor_q.quantize(model, asked, skip=skip, progress=False)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert packed(again) == packed(model)
    ids = torch.arange(8).view(1, 8)
    state = again.state_dict()
    assert all(torch.equal(torch.as_tensor(t), state[n]) for n, t in model.state_dict().items())
    # Measured: 4e-3 for LLM.int8, of the same codes and scales; its products round inputs too.
    close = 0.02 if asked == "llm_int8" else 1e-5
    assert testing.relative_error(again(ids).logits, model(ids).logits) < close
