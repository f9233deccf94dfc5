"""Make weights with torchao's own quantizers, and layers and models that hold them."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

BF16 = torch.bfloat16

quantization: Any = pytest.importorskip("torchao.quantization")
mx_formats: Any = importlib.import_module("torchao.prototype.mx_formats")


def _intx(bits: int, granularity: Any, **more: Any) -> Any:
    dtype = getattr(torch, f"int{bits}")
    return quantization.IntxWeightOnlyConfig(dtype, granularity, **more)


ROW, TENSOR = quantization.PerRow(), quantization.PerTensor()
ASYMMETRIC = quantization.MappingType.ASYMMETRIC

#: What `quantize_` is asked for, by the name of the case; and the format that we read it in.
CONFIGS: Mapping[str, tuple[Any, str]] = {
    "int8 row": (quantization.Int8WeightOnlyConfig(), "int8_row"),
    "int8 tensor": (quantization.Int8WeightOnlyConfig(granularity=TENSOR), "int8_tensor"),
    "int8 group": (
        quantization.Int8WeightOnlyConfig(granularity=quantization.PerGroup(64)),
        "int8_g64",
    ),
    "float8 row": (quantization.Float8WeightOnlyConfig(granularity=ROW), "fp8_e4m3_row"),
    "float8 tensor": (quantization.Float8WeightOnlyConfig(granularity=TENSOR), "fp8_e4m3_tensor"),
    "float8 e5m2": (
        quantization.Float8WeightOnlyConfig(torch.float8_e5m2, granularity=TENSOR),
        "fp8_e5m2_tensor",
    ),
    **{
        f"intx{bits} group": (_intx(bits, quantization.PerGroup(32)), "int8_g32")
        for bits in range(2, 9)
    },
    "intx4 row": (_intx(4, quantization.PerAxis(0)), "int8_row"),
    "intx4 zero points": (
        _intx(4, quantization.PerGroup(128), mapping_type=ASYMMETRIC),
        "int8_g128",
    ),
    "nvfp4": (mx_formats.NVFP4WeightOnlyConfig(), "nvfp4_tiles"),
    "nvfp4 one level": (
        mx_formats.NVFP4WeightOnlyConfig(use_dynamic_per_tensor_scale=False),
        "nvfp4_tiles",
    ),
}


def quantize_(model: nn.Module, config: Any, **how: Any) -> None:
    """Quantize as torchao does, and leave Inductor's settings to the tests that come after."""
    if getattr(config, "set_inductor_config", False):
        config = dataclasses.replace(config, set_inductor_config=False)
    quantization.quantize_(model, config, **how)


def linear(config: Any, n: int = 128, k: int = 256, *, bias: bool = False, seed: int = 0) -> Any:
    """Make a frozen layer that torchao has quantized."""
    torch.manual_seed(seed)
    layer = nn.Sequential(nn.Linear(k, n, bias=bias, dtype=BF16))
    quantize_(layer, config)
    return layer.requires_grad_(False)[0]


def nf4(n: int = 128, k: int = 256) -> Any:
    """Make an `NF4Tensor`, which is no `TorchAOBaseTensor`, and which `quantize_` does not make."""
    generator = torch.Generator().manual_seed(0)
    return quantization.to_nf4(torch.randn(n, k, generator=generator).to(BF16), 64, 256)


def with_parts(weight: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    """Return a weight of the same class whose inner tensors are what `change` makes of them."""
    names, context = weight.__tensor_flatten__()
    parts = {name: change(name, getattr(weight, name)) for name in names}
    return type(weight).__tensor_unflatten__(parts, context, weight.shape, weight.stride())


class Adapted(nn.Module):
    """A layer with a hand-written adapter."""

    def __init__(self, base: nn.Module, n: int = 128, k: int = 256) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.base = base
        self.a = nn.Parameter(torch.randn(8, k, generator=generator).to(BF16) / 16)
        self.b = nn.Parameter(torch.randn(n, 8, generator=generator).to(BF16) / 16)

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.base(x) + (x @ self.a.t()) @ self.b.t() * 2.0
        return adapted


# --- what a CPU cannot make, by the layouts that torchao and torch document -----------------------


def int4_numbers(n: int, k: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw numbers from -8 to 7, and scales and zero points of groups."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-8, 8, (n, k), generator=generator)
    groups = (n, -(-k // group))
    scale = torch.rand(groups, generator=generator).to(BF16) + 0.5
    return numbers, scale, torch.randn(groups, generator=generator).to(BF16)


def int4_values(numbers: Tensor, scale: Tensor, zero_point: Tensor, group: int) -> Tensor:
    """Return `number * scale + zero_point` in float64."""
    columns = numbers.shape[1]
    wide = (t.double().repeat_interleave(group, 1)[:, :columns] for t in (scale, zero_point))
    scales, zeros = wide
    return numbers * scales + zeros


def int4_plain(n: int, k: int, group: int) -> tuple[Any, Tensor]:
    """Make an `Int4Tensor` (mslk's `int4_row_quantize_zp` and `pack_int4`), and its values."""
    numbers, scale, zero_point = int4_numbers(n, k, group)
    packed = (numbers[:, ::2] & 15 | numbers[:, 1::2] << 4).to(torch.int8)
    columns = (scale.t().contiguous(), zero_point.t().contiguous())
    weight = quantization.Int4Tensor(packed, *columns, [1, group], torch.Size((n, k)))
    return weight, int4_values(numbers, scale, zero_point, group)


def int4_tiles(n: int, k: int, group: int) -> tuple[Any, Tensor]:
    """Make an `Int4TilePackedTo4dTensor`, and its values."""
    rows, columns = -(-n // 8) * 8, -(-k // 1024) * 1024
    numbers, scale, zero_point = int4_numbers(rows, columns, group)
    scale_and_zero = torch.stack([scale.t(), zero_point.t()], 2).contiguous()
    weight = quantization.Int4TilePackedTo4dTensor(
        pack_tiles(numbers + 8), scale_and_zero, [1, group], torch.Size((n, k))
    )
    return weight, int4_values(numbers, scale, zero_point, group)[:n, :k]


def pack_tiles(unpacked: Tensor) -> Tensor:
    """Lay codes out as the comments of `matrix_to_m16n8k16_Bint4_layout` say, thread by thread.

    That is the kernel of aten's int4mm.cu which packs them on a GPU.
    """
    rows, columns = unpacked.shape
    codes = unpacked.tolist()
    packed = torch.zeros(rows // 8, columns // 128, 32, 4, dtype=torch.int64)
    for tile in range(rows // 8):
        for outer in range(columns // 128):
            for t in range(32):
                for part in range(4):
                    first = (outer * 8 + 2 * part) * 16 + t % 4 * 2
                    ks = [first + base + more for base in (0, 16) for more in (0, 1, 8, 9)]
                    v = [codes[tile * 8 + t // 4][k_] for k_ in ks]
                    word = sum(v[e] << 4 * p for p, e in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
                    packed[tile, outer, t, part] = word
    return packed.to(torch.uint32).view(torch.int32)


def quantized_tiles(source: Tensor, group: int, algorithm: str) -> tuple[Any, Tensor]:
    """Have torchao make an `Int4TilePackedTo4dTensor` of a weight on a CPU, and its values.

    Everything is torchao's own but the op that lays codes out, which torch has for GPUs alone:
    `pack_tiles` is in its place. torchao asks what the GPU can do, and is told.
    """
    found: list[Tensor] = []

    def convert(pairs: Tensor, inner_k_tiles: int) -> Tensor:
        assert inner_k_tiles == 8
        # The first code of a pair is in the high nibble.
        found.append(torch.stack([pairs >> 4, pairs & 15], 2).flatten(1).to(torch.int32))
        return pack_tiles(found[0])

    n, k = source.shape
    layer = nn.Sequential(nn.Linear(k, n, bias=False, dtype=BF16))
    layer[0].weight = nn.Parameter(source)
    config = quantization.Int4WeightOnlyConfig(
        group,
        int4_packing_format="tile_packed_to_4d",
        int4_choose_qparams_algorithm=algorithm,
    )
    with (
        torch.library._scoped_library("aten", "IMPL") as library,
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
    ):
        library.impl("_convert_weight_to_int4pack", convert, "CPU")
        quantize_(layer, config)
    weight: Any = layer[0].weight
    (codes,) = found
    primitives: Any = importlib.import_module("torchao.quantization.quant_primitives")
    scale, zero_point = weight.scale_and_zero.float().unbind(2)
    values = primitives._dequantize_affine_tinygemm(
        codes, (1, group), scale.t(), zero_point.t(), torch.int32, 0, 15
    )
    return weight, values[:n, :k].double()


def mx(name: str, n: int = 128, k: int = 256) -> Any:
    """Make a weight in an MX format, of which torchao has no product that is weight-only."""
    module: Any = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    generator = torch.Generator().manual_seed(0)
    return module.MXTensor.to_mx(
        torch.randn(n, k, generator=generator).to(BF16), getattr(torch, name), 32
    )
