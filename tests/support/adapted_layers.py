"""Quantized layers with adapters of PEFT's and by hand, a step of one, and what it is held to."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inductor_q import ops, testing
from inductor_q.capture.bnb_state import bnb_operands
from tests.support.compiling import Compiled, compile_step, step

bnb = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

BF16, FP32 = torch.bfloat16, torch.float32
N, K = 128, 64
CLOSE = 0.015  # a few roundings to bf16 (2**-9 each) between the reordered sums
TANGENTS = "the input comes from tangents_1, which cannot write into a wider buffer"


def linear(n: int = N, k: int = K, *, bias: bool = False, **quantization: Any) -> Any:
    generator = torch.Generator().manual_seed(11)
    weight = (torch.randn(n, k, generator=generator) * k**-0.5).to(BF16)
    offset = torch.randn(n, generator=generator).to(BF16) if bias else None
    return testing.quantized_linear(weight, offset, **quantization)


def lora(adapter_dtype: torch.dtype = BF16, **settings: Any) -> nn.Module:
    return testing.lora_linear(N, K, adapter_dtype=adapter_dtype, **settings)


def peft_adapters(*configs: Any) -> nn.Module:
    """A quantized layer under one active bf16 adapter for each config."""
    model: Any = nn.Module()
    model.proj = linear()
    model.is_loaded_in_4bit = True
    for i, config in enumerate(configs):
        with pytest.warns() if i else contextlib.nullcontext():
            peft.inject_adapter_in_model(config, model, adapter_name=f"adapter_{i}")
    model.proj.set_adapter([f"adapter_{i}" for i in range(len(configs))])
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.proj.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            noise = torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5
            parameter.data = noise.to(BF16)
    proj: nn.Module = model.proj
    return proj.train()


def config(r: int, alpha: float, **settings: Any) -> Any:
    return peft.LoraConfig(r=r, lora_alpha=alpha, target_modules=["proj"], **settings)


class ByHand(nn.Module):
    """LoRA without PEFT, next to a Linear4bit."""

    def __init__(self, scaling: float | None = None, r: int = 8) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(13)
        self.base = linear()
        self.a = nn.Parameter((torch.randn(r, K, generator=generator) * K**-0.5).to(BF16))
        self.b = nn.Parameter((torch.randn(N, r, generator=generator) * r**-0.5).to(BF16))
        self.scaling = scaling

    def forward(self, x: Tensor) -> Tensor:
        low = x @ self.a.t() @ self.b.t()
        y: Tensor = self.base(x) + (low if self.scaling is None else low * self.scaling)
        return y


class ByOp(ByHand):
    """The qfuse:: ops, used directly."""

    def __init__(self, verb: str) -> None:
        super().__init__()
        self.verb = verb
        weight = self.base.weight
        self.operands, self.format, self.shape = bnb_operands(weight, weight.quant_state)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.operands, self.format, self.shape
        if self.verb == "dequantize":
            return x @ ops.dequantize(*packed, x.dtype).t()
        if self.verb == "linear":
            return ops.linear(x, *packed)
        return ops.lora_linear(x, *packed, [self.a], [self.b], [2.0])


class Shared(nn.Module):
    """Three layers with adapters over one input, as q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ByHand(2.0) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x) for layer in self.layers)
        return torch.tanh(q) + torch.sin(k) + torch.cos(v)


class SharedPlain(nn.Module):
    """Two layers without adapters over one input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.gate(x)) * self.up(x)
        return y


class Float32(nn.Module):
    """Three layers over one float32 input, which each casts on its own; their sums are float32.

    PEFT casts the adapter's term under autocast of a CPU, and leaves it to the addition on a GPU.
    """

    def __init__(self, *, widened: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ByHand() for _ in range(3)])
        for layer in self.layers if bias else ():
            layer.base = linear(bias=True)
        self.widened = widened

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x.float())
        q, k, v = (self.one(layer, x) for layer in self.layers)
        return torch.tanh(q) + torch.sin(k) + torch.cos(v)

    def one(self, layer: Any, x: Tensor) -> Tensor:
        low = x.to(BF16) @ layer.a.t() @ layer.b.t() * 2.0
        y: Tensor = layer.base(x) + (low.float() if self.widened else low)
        return y


def x_MK(*, dtype: torch.dtype = BF16, seed: int = 3, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 48, K, generator=generator).to(device, dtype).requires_grad_()


def eager(
    module: nn.Module, x: Tensor, context: contextlib.AbstractContextManager[Any] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    with context or contextlib.nullcontext():
        return step(module, x, module=module)


def compiled(module: nn.Module, x: Tensor, **kwargs: Any) -> Compiled:
    torch.manual_seed(0)
    return compile_step(module, x, **kwargs)


def assert_same(result: Compiled, expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    output, grads = expected
    assert result.output.shape == output.shape and result.output.dtype == output.dtype
    assert testing.relative_error(result.output, output) < CLOSE
    assert result.gradients.keys() == grads.keys()
    for name, grad in grads.items():
        assert result.gradients[name].dtype == grad.dtype
        assert testing.relative_error(result.gradients[name], grad) < CLOSE, name
