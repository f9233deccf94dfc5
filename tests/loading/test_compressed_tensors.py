"""Weights that compressed-tensors itself quantizes and packs, beside what it decompresses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import inductor_q
from inductor_q.formats import FORMATS
from inductor_q.formats.encode import encode
from inductor_q.kbit import meta_parameters
from inductor_q.loading.linear import PackedLinear

quantization: Any = pytest.importorskip("compressed_tensors.quantization")
compressors: Any = pytest.importorskip("compressed_tensors.compressors")
utils: Any = pytest.importorskip("compressed_tensors.quantization.utils")

BF16 = torch.bfloat16

#: The library's schemes, the layout in which it packs each, and the format that is read.
SCHEMES = {
    "NVFP4A16": ("nvfp4-pack-quantized", "nvfp4_divided_rows"),
    "MXFP4A16": ("mxfp4-pack-quantized", "mxfp4"),
    "W4A16": ("pack-quantized", "int4_g128"),
    "W4A16_ASYM": ("pack-quantized", "int4_g128"),
    "FP8": ("float-quantized", "fp8_e4m3_row"),
    "FP8_BLOCK": ("float-quantized", "fp8_e4m3_128x128"),
}


def calibrated(weight: Tensor, args: Any) -> dict[str, Tensor]:
    """Scales and zero points by the library's functions, of each group's smallest and largest."""
    more = {}
    if args.strategy == "tensor":
        groups = weight.reshape(1, -1)
    elif args.strategy == "block":
        groups = weight.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).transpose(1, 2).flatten(2)
    else:
        groups = weight.unflatten(1, (-1, args.group_size))
    if args.strategy == "tensor_group":
        more["global_scale"] = utils.generate_gparam(weight.min(), weight.max()).reshape(1)
    scale, zero = utils.calculate_qparams(groups.amin(-1), groups.amax(-1), args, **more)
    found = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    return found | {f"weight_{name}": value for name, value in more.items()}


@pytest.mark.parametrize("name", SCHEMES)
def test_its_own_weights_are_decoded_as_it_decodes_them(name: str, tmp_path: Path) -> None:
    """Bitwise, in bfloat16, as it computes."""
    layout, format = SCHEMES[name]
    scheme = quantization.preset_name_to_scheme(name, ["Linear"])
    compressor = compressors.BaseCompressor.get_value_from_registry(layout)
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)).to(BF16)
    state = compressor.compress(calibrated(weight, scheme.weights), scheme)
    expected = compressor.decompress(state, scheme)["weight"]
    config = quantization.QuantizationConfig(
        config_groups={"group_0": scheme}, format=layout, quantization_status="compressed"
    ).model_dump(mode="json")
    tensors = {f"0.{key}": tensor.contiguous() for key, tensor in state.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with meta_parameters():
        net = nn.Sequential(nn.Linear(256, 128, bias=False, dtype=BF16))
    layer = inductor_q.load_checkpoint(net, tmp_path, progress=False)[0]  # type: ignore[index]
    assert type(layer) is PackedLinear and layer.format == format
    assert expected.dtype is BF16 and torch.equal(layer.dequantize(BF16), expected)
    assert (layer.dequantize(BF16) - weight).norm() < 0.2 * weight.norm()


def test_its_fp4_packing_is_that_of_ours() -> None:
    """Given one scale, both choose the same codes, and the first of a pair is low."""
    scheme = quantization.preset_name_to_scheme("MXFP4A16", ["Linear"])
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)).to(BF16)
    codes, scale = encode(weight, FORMATS["mxfp4"])
    values = torch.ldexp(torch.ones(1), scale.view(128, -1).int() - 127).to(BF16)
    compressor = compressors.BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    state = compressor.compress({"weight": weight, "weight_scale": values}, scheme)
    assert torch.equal(state["weight_scale"].flatten(), scale)
    assert torch.equal(state["weight_packed"].flatten(), codes)
