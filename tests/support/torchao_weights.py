"""Make weights with torchao's own quantizers, and layers and models that hold them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

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


def linear(config: Any, n: int = 128, k: int = 256, *, bias: bool = False, seed: int = 0) -> Any:
    """Make a frozen layer that torchao has quantized."""
    torch.manual_seed(seed)
    layer = nn.Sequential(nn.Linear(k, n, bias=bias, dtype=BF16))
    quantization.quantize_(layer, config)
    return layer.requires_grad_(False)[0]


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
