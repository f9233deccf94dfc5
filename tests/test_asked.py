"""What may be asked of `inductor_q.quantize`, and what is refused before a weight is read."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import inductor_q
from inductor_q import exc
from inductor_q.asked import dtypes_of, resolve
from inductor_q.formats import FORMATS
from inductor_q.log import warn_once
from tests.support.quantized_nets import Net, packed

torchao: Any = pytest.importorskip("torchao.quantization")
mx: Any = pytest.importorskip("torchao.prototype.mx_formats")
transformers: Any = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"bnb": {"quant_type": "fp4", "blocksize": 128, "nested": False}}, "fp4_b128"),
        ({"bnb": {}}, "nf4_b64_nested"),
        ({"bnb": {"quant_type": "int8"}}, "int8_absmax"),
        ({"fp8": {"of": "e5m2_row"}}, "fp8_e5m2_row"),
        ({"kbit": {"k": 2, "absmax": "fp16"}}, "kbit2_fp16"),
        ({"fp8": {"of": "tensor"}}, "fp8_e4m3_tensor"),
        ({"torchao": {"format": "int8_g64"}}, "int8_g64"),
        ({"torchao": {"format": "int8", "group_size": 64}}, "int8_g64"),
        ({"torchao": {"format": "int4", "group_size": 32}}, "int4_tiles_g32"),
        ({"torchao": {"format": "int4"}}, "int4_tiles_g128"),
        ({"torchao": {"format": "nf4"}}, "nf4_tensor_b64"),
        ({"torchao": {"format": "nvfp4"}}, "nvfp4_tiles"),
        ({"torchao": {"format": "int4_g32", "group_size": 32}}, "int4_tiles_g32"),
        ({"torchao": {"format": "nf4", "group_size": 64}}, "nf4_tensor_b64"),
        ({"torchao": {"format": "nvfp4", "group_size": 16}}, "nvfp4_tiles"),
        ({"mxfp4": {}}, "mxfp4"),
        ({"mxfp4": {"group_size": 32}}, "mxfp4"),
        ({"fp8": {"of": "128x128"}}, "fp8_e4m3_128x128"),
        ("int4", "int4_tiles_g128"),
        ("int4_g128", "int4_tiles_g128"),
        (
            transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
            "nf4_b64",
        ),
        (transformers.BitsAndBytesConfig(load_in_8bit=True), "int8_absmax"),
        (transformers.FineGrainedFP8Config(), "fp8_e4m3_128x128"),
        (transformers.FineGrainedFP8Config(weight_block_size=[128, 128]), "fp8_e4m3_128x128"),
    ],
    ids=str,
)
def test_what_is_asked_for(asked: Any, name: str) -> None:
    assert resolve(asked) == name
    assert name in FORMATS


def test_configurations_of_torchao() -> None:
    config = torchao.IntxWeightOnlyConfig(granularity=torchao.PerGroup(32))
    for asked in (config, {"torchao": {"config": config}}, transformers.TorchAoConfig(config)):
        assert resolve(asked) is config
    net = inductor_q.quantize(Net(), config, skip=["lm_head", "down"], progress=False)
    assert packed(net) == {"up": "int8_g32"}


REFUSED = [
    ({"bnb": {}, "torchao": {}}, "expected exactly one key of bnb, torchao, kbit, fp8, mxfp4"),
    ({}, "expected exactly one key"),
    ({"gguf": {}}, "'gguf' is none of bnb, torchao, kbit, fp8, mxfp4"),
    ({"bnb": {"quant_typ": "nf4"}}, "bnb has no quant_typ; it has quant_type, blocksize, nested"),
    ({"bnb": {"blocksize": 48}}, "blocksize one of"),
    ({"bnb": {"quant_type": "nf5"}}, "quant_type is one of .*'int8'"),
    ({"bnb": {"quant_type": "int8", "nested": True}}, "LLM.int8 has no nested: leave that out"),
    ({"bnb": {"load_in_8bit": True}}, "has no load_in_8bit; .*Ask for 'llm_int8'"),
    ({"fp8": {"of": "banana"}}, "of is one of .*'row', 'tensor', '128x128'"),
    ({"fp8": {"of": None}}, "of is one of"),
    (
        {"torchao": {"format": "nf4", "activation_dtype": "nf4"}},
        "activations keep .*: leave it out",
    ),
    ({"kbit": {"k": 8}}, r"k is one of \(2, 3, 4, 5\)"),
    ({"torchao": {}}, "torchao takes either a format or a config"),
    (
        {"torchao": {"format": "int8", "config": torchao.Int8WeightOnlyConfig()}},
        "torchao takes either a format or a config",
    ),
    (
        {"torchao": {"group_size": 32, "config": torchao.Int8WeightOnlyConfig()}},
        "group_size goes with format",
    ),
    (
        {"torchao": {"format": "int4", "group_size": 48}},
        "group_size=48 beside 'int4'; it is 32 or 64 or 128 or 256",
    ),
    ({"torchao": {"format": "int4", "group_size": 32.0}}, "group_size=32.0 beside 'int4'"),
    ({"torchao": {"format": "int4_g32", "group_size": 64}}, "beside 'int4_g32'; it is 32. Leave"),
    ({"torchao": {"format": "nvfp4", "group_size": 32}}, "beside 'nvfp4'; it is 16. Leave it out"),
    ({"torchao": {"format": "nf4", "group_size": 128}}, "beside 'nf4'; it is 64. Leave it out"),
    ({"mxfp4": {"group_size": 16}}, "group_size=16 beside 'mxfp4'; it is 32. Leave it out"),
    (
        {"torchao": {"format": "fp8_row", "group_size": 32}},
        r"beside 'fp8_row'; that has no groups.*: 'int4' \(32, 64, 128, 256\)",
    ),
    ({"torchao": {"format": "mxfp4", "group_size": 32}}, "torchao packs no weights in 'mxfp4'"),
    ({"torchao": {"format": "mxfp4"}}, "torchao packs no weights in 'mxfp4' .* by itself"),
    ({"torchao": {"format": "kbit4"}}, "torchao packs no weights in 'kbit4_e4m4'"),
    ({"torchao": {"format": torchao.Int8WeightOnlyConfig()}}, "format is a name, .* under config"),
    ({"mxfp4": {"block": 16}}, "mxfp4 has no block"),
    ({"load_in_4bit": False}, "load_in_4bit set to False asks for nothing"),
    ({"load_in_4bit": False, "load_in_8bit": False}, "load_in_4bit and load_in_8bit set to False"),
    ({"load_in_4bit": True, "bnb": {}, "kbit": {}}, "expected exactly one key"),
    ({"load_in_4bit": True, "load_in_8bit": True}, "exclude each other"),
    ({"load_in_4bit": "False"}, "load_in_4bit are True or False"),
    (
        {"bnb_4bit_quant_type": "nf4"},
        "goes with load_in_4bit=True. Ask for {'bnb': {'quant_type': 'nf4'}}",
    ),
    ({"load_in_8bit": True, "bnb_4bit_quant_type": "nf4"}, "goes with load_in_4bit=True"),
    ({"load_in_4bit": False, "bnb_4bit_use_double_quant": True}, "goes with load_in_4bit=True"),
    ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf5"}, "quant_type is one of"),
    ({"load_in_4bit": True, "llm_int8_threshold": 1.0}, "'llm_int8_threshold' is none of bnb"),
    (transformers.BitsAndBytesConfig(), "neither load_in_4bit nor load_in_8bit"),
    ({"bnb": {"nested": "False"}}, "nested is True or False, not 'False'"),
    ({"bnb": {"blocksize": 64.0}}, "blocksize one of"),
    ({"bnb": {"quant_type": ["nf4"]}}, "quant_type is one of"),
    ({"bnb": "nf4"}, "expected a mapping for 'bnb', with any of .*'nested'"),
    ({"fp8": "row"}, r"expected a mapping for 'fp8', with any of \('of',\)"),
    ({"kbit": 4}, "expected a mapping for 'kbit'"),
    ({"kbit": {"k": 4.0}}, r"k is one of \(2, 3, 4, 5\)"),
    (
        transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig(), ["*.up"]),
        r"transformers reads \['\*.up'\] as regular expressions: nothing to repeat",
    ),
    (
        transformers.TorchAoConfig(
            torchao.Int8WeightOnlyConfig(), include_input_output_embeddings=True
        ),
        "embeddings are left alone here",
    ),
    (torchao.FqnToConfig({"up": torchao.Int8WeightOnlyConfig()}), "filter_fn=None"),
    (torchao.PerRow(), "expected a name, a mapping or a library's configuration"),
    (4, "expected a name, a mapping or a library's configuration"),
    (transformers.Mxfp4Config(), "load_checkpoint. To pack a model's values, .*, mxfp4"),
    (transformers.QuantoConfig(), "nothing here reads or packs 'quanto'. To pack a model's"),
    (
        transformers.FineGrainedFP8Config(weight_block_size=(64, 64)),
        r"weight_block_size=\(64, 64\); .* weight_block_size=\(128, 128\). Leave it out",
    ),
    (transformers.FineGrainedFP8Config(weight_block_size=None), "ask for 'fp8_row' or 'fp8_ten"),
    (
        transformers.FineGrainedFP8Config(activation_scheme="static"),
        "with activation_scheme='dynamic'",
    ),
    (
        transformers.FineGrainedFP8Config(dequantize=True),
        "dequantize=True; .* by inductor_q.load_checkpoint",
    ),
]

#: What quantizes the weight alone as each of these does.
OF_ACTIVATIONS = [
    (torchao.Int8DynamicActivationInt8WeightConfig(), "'int8'"),
    (
        torchao.Int8DynamicActivationInt8WeightConfig(granularity=torchao.PerTensor()),
        "'int8_tensor'",
    ),
    (torchao.Int8StaticActivationInt8WeightConfig(), "'int8'"),
    (torchao.Float8DynamicActivationInt4WeightConfig(), "'int4'"),
    (torchao.Float8DynamicActivationFloat8WeightConfig(), "'fp8_tensor'"),
    (
        torchao.Float8DynamicActivationFloat8WeightConfig(granularity=torchao.PerRow()),
        "'fp8_row'",
    ),
    (
        torchao.Float8DynamicActivationFloat8WeightConfig(
            granularity=[torchao.PerBlock([1, 128]), torchao.PerBlock([128, 128])]
        ),
        "'fp8_128x128'",
    ),
    (torchao.Int8DynamicActivationIntxWeightConfig(), "IntxWeightOnlyConfig.*group_size=32"),
    (mx.NVFP4DynamicActivationNVFP4WeightConfig(), "'nvfp4'"),
    (mx.MXDynamicActivationMXWeightConfig(), "'mxfp8'"),
    (
        mx.MXDynamicActivationMXWeightConfig(
            activation_dtype=torch.float4_e2m1fn_x2, weight_dtype=torch.float4_e2m1fn_x2
        ),
        "'mxfp4'",
    ),
]


@pytest.mark.parametrize(("config", "ask_for"), OF_ACTIVATIONS, ids=str)
def test_configurations_that_quantize_activations(config: Any, ask_for: str) -> None:
    """They are refused before torchao is asked whether the device has the product."""
    for asked in (config, {"torchao": {"config": config}}):
        with pytest.raises(exc.WrongScheme, match=f"activations as well.* Ask for {ask_for}"):
            resolve(asked)
    if ask_for.startswith("'"):
        assert resolve(ask_for.strip("'")) in FORMATS


@pytest.mark.parametrize(("asked", "problem"), REFUSED, ids=str)
def test_what_is_no_format(asked: Any, problem: str) -> None:
    net = Net()
    with pytest.raises(exc.WrongScheme, match=problem):
        inductor_q.quantize(net, asked, progress=False)
    assert type(net.up) is nn.Linear


def test_old_spellings_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """They are translated, and what is asked for beside them wins."""
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "inductor_q"):
        assert resolve({"load_in_4bit": True}) == "nf4_b64_nested"
        assert resolve({"load_in_4bit": True, "load_in_8bit": False}) == "nf4_b64_nested"
        assert resolve({"load_in_8bit": True}) == "int8_absmax"
        assert resolve({"load_in_8bit": True, "bnb": {"quant_type": "fp4"}}) == "fp4_b64_nested"
        assert resolve({"load_in_4bit": False, "bnb": {}}) == "nf4_b64_nested"
    assert [record.getMessage() for record in caplog.records] == [
        "load_in_4bit is deprecated: ask for 'nf4'",
        "load_in_8bit is deprecated: ask for 'llm_int8'",
        "load_in_8bit is deprecated, and ignored beside 'bnb'",
        "load_in_4bit is deprecated, and ignored beside 'bnb'",
    ]


def test_old_spellings_of_how_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """They are fields of "bnb" now, dtypes too, and one that is there wins."""
    warn_once.cache_clear()
    old = {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_compute_dtype": None}
    with caplog.at_level(logging.WARNING, "inductor_q"):
        assert resolve(old) == resolve(old) == "fp4_b64_nested"
        assert resolve({**old, "bnb_4bit_use_double_quant": False}) == "fp4_b64"
        assert resolve({**old, "bnb": {}}) == "nf4_b64_nested"
        how = {"bnb_4bit_quant_storage": "bfloat16", "bnb_4bit_compute_dtype": torch.float16}
        assert dtypes_of({"load_in_4bit": True, **how}) == {
            "quant_storage": torch.bfloat16,
            "compute_dtype": torch.float16,
        }
    first, *_, last = [record.getMessage() for record in caplog.records]
    assert first == (
        "load_in_4bit and bnb_4bit_quant_type and bnb_4bit_compute_dtype are deprecated: "
        "ask for {'bnb': {'quant_type': 'fp4'}}"
    )
    assert last.startswith("load_in_4bit and bnb_4bit_quant_storage and bnb_4bit_compute_dtype")
    assert "bnb_4bit_quant_type is deprecated, and ignored beside 'bnb'" in caplog.text
    assert len(caplog.records) == 6
