"""`inductor_q.quantize`: what comes of it, and what is refused before a layer is replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch._inductor import config as inductor_config

import inductor_q
from inductor_q import capture, exc, kbit, ops, quantization, testing
from inductor_q.experts import ExpertStack
from inductor_q.experts import quantize as quantize_experts
from inductor_q.formats import FORMATS
from inductor_q.loading.readers import find_in
from inductor_q.log import warn_once
from tests.support.compiling import compile_step, no_codegen
from tests.support.quantized_nets import BF16, Net, packed, tiny

bnb: Any = pytest.importorskip("bitsandbytes")
torchao: Any = pytest.importorskip("torchao.quantization")
nf4_api: Any = pytest.importorskip("torchao.prototype._nf4tensor_api")
transformers: Any = pytest.importorskip("transformers")


WRITTEN = {
    "nf4": "nf4_b64_nested",
    "fp4_b128": "fp4_b128",
    "llm_int8": "int8_absmax",
    "kbit3": "kbit3_e4m4",
    "kbit4_fp16": "kbit4_fp16",
    "int8": "int8_row",
    "int8_g32": "int8_g32",
    "int8_tensor": "int8_tensor",
    "fp8_row": "fp8_e4m3_row",
    "fp8_e5m2_tensor": "fp8_e5m2_tensor",
    "nvfp4": "nvfp4_tiles",
    "nvfp4_rows": "nvfp4_rows",
    "mxfp4": "mxfp4",
    "mxfp8": "mxfp8_e4m3",
    "fp8_128x128": "fp8_e4m3_128x128",
}


def test_llm_int8_is_written_on_any_device() -> None:
    """bitsandbytes' own move to a device quantizes what comes from a CPU; a weight that lies on a
    GPU already, for which "meta" stands here, would keep its dtype."""
    with torch.device("meta"):
        linear = nn.Linear(64, 128, bias=False, dtype=BF16)
    layer: Any = quantization._bnb_8bit(bnb.nn, linear, "weight")
    found = capture.packed_weight(layer, "weight")
    assert found is not None and found.read is not None, found
    codes, scales = found.read().operands
    assert (codes.dtype, codes.shape, codes.device.type) == (torch.int8, (128, 64), "meta")
    assert (scales.dtype, scales.shape) == (torch.float32, (128,))


def test_llm_int8_is_read_before_its_first_call_and_after_it() -> None:
    """With the values that bitsandbytes' own move from a CPU quantizes to."""
    linear = Net().up
    own = bnb.nn.Int8Params(linear.weight.detach(), requires_grad=False, has_fp16_weights=False)
    own = own.to("cpu")
    layer: Any = inductor_q.quantize(linear, "llm_int8", progress=False)
    for is_called in (False, True):
        if is_called:
            layer(torch.randn(2, 64, dtype=BF16))
        assert (layer.weight.SCB is None) == is_called
        found = capture.packed_weight(layer, "weight")
        assert found is not None and found.read is not None, found
        codes, scales = found.read().operands
        assert torch.equal(codes, own.CB) and torch.equal(scales, own.SCB)


@pytest.mark.parametrize("asked", WRITTEN)
def test_a_name(asked: str) -> None:
    """The head stays; values are near, and a step of what comes out is fused."""
    dense, net = Net(), Net()
    assert inductor_q.quantize(net, asked, progress=False) is net
    assert packed(net) == dict.fromkeys(("up", "down"), WRITTEN[asked])
    assert type(net.lm_head) is nn.Linear and net.lm_head.weight.requires_grad
    layer = capture.packed_weight(net.up, "weight") or capture.packed_weight(net.up, "qweight")
    assert layer is not None and layer.read is not None
    operands, format, shape = layer.read()
    values = ops.dequantize(operands, format, shape, BF16)
    assert testing.relative_error(values, dense.up.weight) < (0.3 if "kbit3" in asked else 0.15)
    assert net.up.bias is not None and torch.equal(net.up.bias, dense.up.bias)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(BF16)
    with no_codegen():
        result = compile_step(net, x.requires_grad_(), fullgraph=True)
    assert {v.status for v in result.report.verdicts().values()} == {"fused"}


@pytest.mark.parametrize(
    ("entries", "skip", "left"),
    [
        (["up"], None, {"up"}),  # the default, lm_head, is replaced
        (["up", "norm"], ["lm_head"], {"up", "lm_head"}),
        (["l.*head", "own"], None, {"lm_head", "down"}),
        ([], None, set()),
        (None, None, {"lm_head"}),
    ],
)
def test_what_a_configuration_of_transformers_leaves_alone(
    entries: list[str] | None, skip: list[str] | None, left: set[str]
) -> None:
    for asked in (
        transformers.BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=entries),
        transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig(), entries),
    ):
        net = inductor_q.quantize(Net(), asked, skip=skip, progress=False)
        assert {"up", "down", "lm_head"} - {*packed(net)} == left


def test_what_a_configuration_leaves_alone_below_an_adapter() -> None:
    peft = pytest.importorskip("peft")
    net = peft.get_peft_model(Net(), peft.LoraConfig(r=4, target_modules=["up", "lm_head"]))
    entries = ["up", "lm_head"]
    asked = transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=entries)
    assert {*packed(inductor_q.quantize(net, asked, progress=False))} == {"base_model.model.down"}


def test_skip_is_no_text() -> None:
    with pytest.raises(exc.NotNames, match=r"skip=\['lm_head'\]"):
        inductor_q.quantize(Net(), "nf4", skip="lm_head", progress=False)
    with pytest.raises(exc.NotNames):
        kbit.quantize_model(Net(), 4, skip="lm_head", progress=False)


@pytest.mark.parametrize("asked", ["fp8_row", torchao.Int8WeightOnlyConfig()], ids=str)
def test_inductor_stays_as_it_is(asked: Any) -> None:
    with inductor_config.patch(coordinate_descent_tuning=False):
        inductor_q.quantize(Net(), asked, progress=False)
        assert not inductor_config.coordinate_descent_tuning


def test_names_that_are_not_written() -> None:
    with pytest.raises(exc.UnknownFormat, match="no quantization format 'nf5'; did you mean 'nf4'"):
        inductor_q.quantize(Net(), "nf5")
    with pytest.raises(exc.NoQuantizer, match="hqq4_g64_bf16 is a format to read"):
        inductor_q.quantize(Net(), "hqq4_g64_bf16")


def test_a_configuration_that_quantizes_activations() -> None:
    net = Net()
    config = torchao.Int8DynamicActivationInt8WeightConfig()
    with pytest.raises(exc.WrongScheme, match=r"quantizes activations as well.* Ask for 'int8'"):
        inductor_q.quantize(net, config, progress=False)
    assert type(net.up.weight) is nn.Parameter


@pytest.mark.parametrize(
    ("asked", "error", "problem"),
    [
        ("int8_g32", exc.WrongScheme, "torchao does not take the weight of down .*group size 32"),
        ("nvfp4", exc.WrongScheme, "torchao does not take the weight of down .*divisible by 16"),
        ("int4_plain_g64", exc.WrongScheme, "leaves the weight of down as it is, unpacked"),
        ("kbit4", exc.NotFinite, "weight of down contains NaN"),
        ("mxfp4", exc.NotFinite, "weight of down contains NaN"),
    ],
)
def test_a_layer_that_is_not_taken(asked: str, error: Any, problem: str) -> None:
    """It is named, and those before it are as they were."""
    net = Net()
    net.up = nn.Linear(64, 64, dtype=BF16)
    net.down = nn.Linear(40, 64, bias=False, dtype=BF16)
    net.down.weight.data[0, 0] = float("nan")
    if asked.startswith("int4"):  # packing needs more than a CPU, so this layer is alone
        del net.up
    before = dict(net.named_parameters())
    with pytest.raises(error, match=problem):
        inductor_q.quantize(net, asked, progress=False)
    after = dict(net.named_parameters())
    assert before.keys() == after.keys() and all(before[n] is after[n] for n in after)
    assert all(parameter.requires_grad for parameter in after.values())


def test_codes_that_a_gpu_has_to_pack() -> None:
    layer = nn.Linear(128, 128, bias=False, dtype=BF16)
    with pytest.raises(exc.WrongScheme, match=r"on a GPU alone \(.*\). Say device="):
        inductor_q.quantize(layer, "int4", progress=False)


@pytest.mark.parametrize("asked", ["nf4", "int8", "fp8_row", "kbit4", "mxfp4"])
def test_a_weight_that_is_not_finite(asked: str) -> None:
    """It is named before another is packed, whichever library packs it: it would spoil a block."""
    net = Net()
    net.up, net.down = (nn.Linear(64, 64, dtype=BF16) for _ in range(2))
    net.up.weight.data[3, 5] = float("inf")
    before = dict(net.named_parameters())
    with pytest.raises(exc.NotFinite, match="weight of up contains NaN or infinity"):
        inductor_q.quantize(net, asked, progress=False)
    assert all(parameter is before[name] for name, parameter in net.named_parameters())


@pytest.mark.parametrize("asked", ["nf4", "int8", "kbit4", "mxfp4"])
def test_a_model_without_values(asked: str) -> None:
    with torch.device("meta"):
        net = Net()
    for model, name in ((net, "up"), (net.down, "the layer")):
        with pytest.raises(exc.NoValues, match=f"weight of {name} is on the meta device"):
            inductor_q.quantize(model, asked, progress=False)
    with pytest.raises(exc.NoValues, match=r"Give checkpoint=.* inductor_q.load_checkpoint"):
        kbit.quantize_model(net, 4, progress=False)


def test_a_model_that_is_packed_already() -> None:
    net = inductor_q.quantize(Net(), "nf4", progress=False)
    with pytest.raises(exc.NothingToQuantize, match="2 Linear4bit"):
        inductor_q.quantize(net, "int8", progress=False)


@pytest.mark.parametrize("asked", ["nf4", "int8", "kbit4", "mxfp4"])
def test_from_a_checkpoint(asked: str, tmp_path: Path) -> None:
    """Bitwise what is quantized in memory; the model is never held in 16 bits."""
    path = tmp_path / "model.safetensors"
    save_file(Net().state_dict(), path)
    with kbit.meta_parameters():
        empty = Net()
    net = inductor_q.quantize(empty, asked, checkpoint=path, progress=False)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(BF16)
    with torch.no_grad():
        expected = inductor_q.quantize(Net(), asked, progress=False)(x)
        assert torch.equal(net(x), expected)


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_a_configuration_and_its_checkpoint(tied: bool, tmp_path: Path) -> None:
    """It is bitwise what quantizing the loaded model gives."""
    config = testing.tiny_qwen3_config(num_hidden_layers=2, tie_word_embeddings=tied)
    torch.manual_seed(0)
    source = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16).eval()
    source.save_pretrained(tmp_path)
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    model = inductor_q.quantize(read, "nf4", checkpoint=tmp_path, progress=False)
    assert not model.training and {p.dtype for p in model.parameters()} == {BF16, torch.uint8}
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        expected = inductor_q.quantize(source, "nf4", progress=False)(ids).logits
        assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("asked", ["int8", "nf4"])
def test_a_configuration_stays_as_it_is(asked: str, tmp_path: Path) -> None:
    """What a model is marked with stays with the model: the next one may be of another format."""
    config = testing.tiny_qwen3_config(num_hidden_layers=1)
    source = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16)
    source.save_pretrained(tmp_path / "source")
    read = transformers.AutoConfig.from_pretrained(tmp_path / "source")
    before = read.to_dict()
    how: Any = {"checkpoint": tmp_path / "source", "progress": False}
    first: Any = inductor_q.quantize(read, asked, **how)
    assert read.to_dict() == before and hasattr(first.config, "quantization_config")
    net: Any = kbit.dequantize_model(inductor_q.quantize(read, "mxfp4", **how))
    net.save_pretrained(tmp_path / "plain")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=BF16)
    assert type(plain.model.layers[0].mlp.up_proj) is nn.Linear
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, net(ids).logits)


@pytest.mark.parametrize("way", ["mapping", "config"])
def test_dtypes_of_storage_and_products(way: str) -> None:
    asked: Any = {"bnb": {"quant_storage": BF16, "compute_dtype": "float16"}}
    if way == "config":
        asked = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_quant_storage=BF16,
            bnb_4bit_compute_dtype=torch.float16,
        )
    net: Any = inductor_q.quantize(Net(), asked, progress=False)
    assert (net.up.weight.dtype, net.up.compute_dtype) == (BF16, torch.float16)
    plain: Any = inductor_q.quantize(
        Net(), "nf4" if way == "mapping" else "nf4_b64", progress=False
    )
    assert torch.equal(net.up.weight.view(torch.uint8).flatten(), plain.up.weight.flatten())
    with pytest.raises(exc.WrongScheme, match=r"quant_storage is one of .* not torch.int8"):
        inductor_q.quantize(Net(), {"bnb": {"quant_storage": torch.int8}}, progress=False)


def test_fp8_as_transformers_asks_for_it() -> None:
    """Its list of modules to leave alone is heeded."""
    config = transformers.FineGrainedFP8Config(modules_to_not_convert=["up"])
    net = inductor_q.quantize(Net(), config, progress=False)
    assert packed(net) == dict.fromkeys(("down", "lm_head"), "fp8_e4m3_128x128")


@pytest.mark.parametrize(("name", "value"), [("block_size", 128), ("scaler_block_size", 128)])
def test_nf4_tensors_of_other_sizes(name: str, value: int) -> None:
    config = nf4_api.NF4WeightOnlyConfig()
    setattr(config, name, value)
    layer = nn.Linear(256, 256, bias=False, dtype=BF16)
    with pytest.raises(
        exc.WrongScheme, match=r"in blocks of 64 .* leave block_size and scaler_blo"
    ):
        inductor_q.quantize(layer, config, progress=False)


def test_a_group_of_torchaos_that_is_not_read() -> None:
    config = torchao.Int8WeightOnlyConfig(granularity=torchao.PerGroup(16))
    with pytest.raises(exc.WrongScheme, match=r"int8_g16.* Ask for another format; `qfuse formats"):
        inductor_q.quantize(Net(), config, progress=False)


def test_a_threshold_of_outliers_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    net: Any = inductor_q.quantize(Net(), config, progress=False)
    assert net.up.state.threshold == 0
    assert "llm_int8_threshold=6.0 becomes 0.0" in caplog.text


@pytest.mark.parametrize("asked", ["mxfp4", "nvfp4_rows", "fp8_128x128"])
def test_what_is_saved_is_loaded_into_the_plain_model(asked: str, tmp_path: Path) -> None:
    path, x = tmp_path / "m.safetensors", torch.randn(3, 64).to(BF16)
    net = inductor_q.quantize(Net(), asked, progress=False)
    kbit.save(net, path)
    with kbit.meta_parameters():
        empty = Net()
    loaded: Any = kbit.load(empty, path)
    assert packed(loaded) == packed(net) and loaded.up.bias is not None
    assert torch.equal(loaded(x), net(x))
    assert torch.equal(
        kbit.load(inductor_q.quantize(Net(), asked, progress=False), path)(x), net(x)
    )
    other = Net()
    other.up = nn.Linear(32, 128, dtype=BF16)
    with pytest.raises(exc.WrongCheckpoint, match=r"up is \(128, 64\) in it, \(128, 32\) here"):
        kbit.load(other, path)
    assert type(other.down) is nn.Linear
    state = {n: t for n, t in load_file(path).items() if n != "up.scale"}
    with safe_open(path, "pt") as file:
        save_file(state, tmp_path / "damaged.safetensors", file.metadata())
    with pytest.raises(exc.WrongCheckpoint, match=r"up\.scale is not in it"):
        kbit.load(Net(), tmp_path / "damaged.safetensors")


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_written_or_refused(name: str) -> None:
    """None ends in an error of a library."""
    try:
        net = inductor_q.quantize(Net(), name, progress=False)
    except exc.QfuseError as error:
        assert name in str(error)
    else:
        assert packed(net)


def test_fused_experts_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    model = transformers.AutoModelForCausalLM.from_config(testing.tiny_qwen3_moe_config())
    warn_once.cache_clear()
    inductor_q.quantize(model, "nf4", progress=False)
    assert "experts.quantize(model, 'nf4') packs them" in caplog.text
    for asked in ("int8", torchao.Int8WeightOnlyConfig()):  # no stack is packed so
        net = transformers.AutoModelForCausalLM.from_config(testing.tiny_qwen3_moe_config())
        warn_once.cache_clear()
        inductor_q.quantize(net, asked, progress=False)
        assert "inductor_q.experts.quantize packs to nf4, fp4, " in caplog.messages[-1]
    quantize_experts(model, "nf4")
    stacks = [module for module in model.modules() if isinstance(module, ExpertStack)]
    assert {stack.format for stack in stacks} == {"nf4_b64_nested"}


def test_what_is_no_model() -> None:
    with pytest.raises(exc.NotAModel, match="a dict"):
        inductor_q.quantize({"nf4": 1}, "nf4", progress=False)
    with pytest.raises(exc.NoValues, match=r"a Qwen3Config describes.*checkpoint="):
        inductor_q.quantize(testing.tiny_qwen3_config(), "nf4", progress=False)


ALREADY = {
    "mxfp4": ({}, r"inductor_q\.load_checkpoint\(model, path\) .* Mxfp4Config\(dequantize=True\)"),
    "gptq": ({"bits": 4, "group_size": 64}, "inductor_q.load_checkpoint.* inductor_q.kbit.dequant"),
    "awq": ({"bits": 8}, "Nothing here reads its codes: .*give a checkpoint in 16 or 32 bits$"),
    "quark": ({}, "Nothing here reads its codes: .*give a checkpoint in 16 or 32 bits$"),
    "bitsandbytes": ({}, r"from_pretrained, and compile that .* model.dequantize\(\) makes"),
    "torchao": ({}, "from_pretrained, and compile that .* inductor_q.kbit.dequantize_model"),
    "compressed-tensors": ({}, "Nothing here reads its codes: its format is .None"),
}


@pytest.mark.parametrize("method", ALREADY)
def test_a_checkpoint_that_is_quantized_already(method: str, tmp_path: Path) -> None:
    """The way out is one that takes what the method makes."""
    more, way_out = ALREADY[method]
    said = {"quantization_config": {"quant_method": method, **more}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(exc.AlreadyQuantized, match=f"quant_method='{method}'.*{way_out}") as error:
        inductor_q.quantize(Net(), "nf4", checkpoint=tmp_path, progress=False)
    if "inductor_q.load_checkpoint(" in str(error.value):
        find_in(tmp_path)
    else:
        with pytest.raises(exc.UnreadCheckpoint):
            find_in(tmp_path)


def test_what_bitsandbytes_has_quantized_is_quantized_anew(tmp_path: Path) -> None:
    """By the way out that the error names."""
    tiny("nf4").save_pretrained(tmp_path)
    with pytest.raises(exc.AlreadyQuantized, match=r"model\.dequantize\(\)"):
        inductor_q.quantize(Net(), "mxfp4", checkpoint=tmp_path, progress=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16).dequantize()
    inductor_q.quantize(model, "mxfp4", progress=False)
    assert {*packed(model).values()} == {"mxfp4"}
