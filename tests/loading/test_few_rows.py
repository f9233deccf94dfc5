"""Few rows on a CPU, compiled: layers as quantizers and checkpoints make them are read packed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import inductor_q
from inductor_q import capture, ops
from inductor_q.kbit import meta_parameters
from inductor_q.kernels import linear_rows_cpp
from tests.support.compiling import Compiled, compile_step, no_codegen
from tests.support.few_rows import error
from tests.support.quantized import DTYPES
from tests.support.shipped import random

KERNEL = linear_rows_cpp.KERNEL
pytestmark = pytest.mark.skipif(bool(KERNEL.missing()), reason=KERNEL.missing() or "it is there")

#: No multiple of 64 columns, of 128 rows, or of the rows that the kernel unpacks together.
ROWS, COLUMNS = 80, 160
#: What the order of a sum changes in float32.
ROUNDING = 3e-7

State = dict[str, Tensor]


class Pair(nn.Module):
    """Two layers of one input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(COLUMNS, ROWS, dtype=dtype)
        self.second = nn.Linear(COLUMNS, ROWS, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.first(x), self.second(x)), -1)


def modelopt(weight: Tensor) -> State:
    """NVFP4 as ModelOpt writes it, of random numbers."""
    return {
        "weight": random(ROWS, COLUMNS // 2, dtype=torch.uint8),
        "weight_scale": random(ROWS, COLUMNS // 16, dtype=torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.013),
    }


def compressed(weight: Tensor, preset: str, layout: str) -> State:
    """What compressed-tensors itself makes of a weight."""
    compressors: Any = pytest.importorskip("compressed_tensors.compressors")
    quantization: Any = pytest.importorskip("compressed_tensors.quantization")
    scheme = quantization.preset_name_to_scheme(preset, ["Linear"])
    group = scheme.weights.group_size
    largest = weight.float().reshape(ROWS, -1, group).abs().amax(-1)
    state = {"weight": weight}
    if group == 16:
        state["weight_global_scale"] = 448 * 6 / largest.max().reshape(1)
        state["weight_scale"] = largest / 6 * state["weight_global_scale"]
    else:
        state["weight_scale"] = torch.exp2(largest.log2().floor() - 2)
    compressor = compressors.BaseCompressor.get_value_from_registry(layout)
    found: State = compressor.compress(state, scheme)
    return found


def written(packed: Callable[[Tensor], State], config: dict[str, str]) -> Callable[..., nn.Module]:
    """A maker of the pair whose weights a checkpoint holds as `packed` has them."""

    def made(folder: Path, dtype: torch.dtype) -> nn.Module:
        state: State = {}
        pair = Pair(torch.bfloat16)
        for name, layer in (("first", pair.first), ("second", pair.second)):
            bias = {} if layer.bias is None else {"bias": layer.bias.detach()}
            parts = {**packed(layer.weight.detach()), **bias}
            state |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        save_file(state, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
        with meta_parameters():
            net = Pair(dtype)
        inductor_q.load_checkpoint(net, folder, progress=False)
        return net

    return made


def quantized(to: str) -> Callable[..., nn.Module]:
    return lambda folder, dtype: inductor_q.quantize(Pair(dtype), to, progress=False)


def of_compressed_tensors(preset: str, layout: str) -> Callable[..., nn.Module]:
    config = {"quant_method": "compressed-tensors", "format": layout}
    return written(lambda weight: compressed(weight, preset, layout), config)


#: The format -> what makes a pair of layers in it.
MAKERS: dict[str, Callable[[Path, torch.dtype], nn.Module]] = {
    **{f"kbit{k}_e4m4": quantized(f"kbit{k}") for k in (2, 3, 4, 5)},
    "kbit3_fp16": quantized("kbit3_fp16"),
    "mxfp4": of_compressed_tensors("MXFP4A16", "mxfp4-pack-quantized"),
    "nvfp4_divided_rows": of_compressed_tensors("NVFP4A16", "nvfp4-pack-quantized"),
    "nvfp4_rows": written(modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "nvfp4_tiles": quantized("nvfp4"),
}


def dense(net: nn.Module, name: str) -> nn.Module:
    """The same layers, which hold format `name`, with their values in float64."""
    plain = Pair(torch.float64)
    for of, layer in net.named_children():
        found = capture.packed_weight(layer, "weight") or capture.packed_weight(layer, "qweight")
        assert found is not None and found.read is not None
        operands, format, shape = found.read()
        assert format == name
        values = ops.dequantize(operands, format, shape, torch.float32)
        own: Any = plain.get_submodule(of)
        own.weight = nn.Parameter(values.double())
        if isinstance(layer.bias, nn.Parameter):
            own.bias = nn.Parameter(layer.bias.double())
    return plain


def compiled(net: nn.Module, x: Tensor, **how: Any) -> Compiled:
    with torch.no_grad():
        return compile_step(net, x, **how)


def check(net: nn.Module, name: str, x: Tensor, **how: Any) -> Compiled:
    """Compile both layers into one call of the kernel, and hold the error against float64 to what
    decoding and multiplying give."""
    result = compiled(net, x, **how)
    assert result.ops["qfuse.linears"] == 1
    assert not result.ops["qfuse.dequantize"] and not result.ops["mm"]
    sites = [s for s in result.report.sites if s.pass_name == "fuse_rows"]
    assert [(s.rejected, s.provider) for s in sites] == [("", KERNEL.name)]
    assert [v.status for v in result.report.verdicts().values()] == ["fused"] * 2
    never = {"qfuse.thresholds": {"linear_rows.max_rows": 0}}
    decoded = compiled(net, x, context=no_codegen(), options=never)
    assert decoded.ops["qfuse.dequantize"] == 2 and not decoded.ops["qfuse.linears"]
    with torch.no_grad():
        exact = dense(net, name)(x.double())
    assert error(result.output, exact) <= 1.25 * error(decoded.output, exact) + ROUNDING
    return result


#: torchao's has no float16.
CASES = [(n, d) for n in MAKERS for d in DTYPES if (n, d) != ("nvfp4_tiles", torch.float16)]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_layers_are_read_packed(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """In one call, for 1, 3 and 8 rows that are not contiguous."""
    net = MAKERS[name](tmp_path, dtype).requires_grad_(False)
    for rows in (1, 3, 8):
        x = torch.randn(COLUMNS, rows).to(dtype).t()
        check(net, name, x, **({} if rows == 3 else {"context": no_codegen()}))


@pytest.mark.parametrize("name", ["kbit3_e4m4", "mxfp4", "nvfp4_rows"])
def test_adapters_share_the_call(name: str, tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    net = MAKERS[name](tmp_path, torch.bfloat16)
    config = peft.LoraConfig(r=4, target_modules=["first", "second"], init_lora_weights=False)
    adapted = peft.get_peft_model(net, config).to(torch.bfloat16).eval()
    result = compiled(adapted, torch.randn(3, COLUMNS).bfloat16(), context=no_codegen())
    assert result.ops["qfuse.linears"] == 1 and not result.ops["mm"]
    assert result.applied["fuse_rows"] == 1 and not result.reasons.get("fuse_rows")
