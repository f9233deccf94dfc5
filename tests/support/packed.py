"""Make layers whose weights are packed, as each library has them, small and on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inductor_q import kbit, testing
from inductor_q.experts.packing import pack
from inductor_q.experts.stack import ExpertStack

BF16 = torch.bfloat16
SHIFTS = torch.arange(0, 32, 4, dtype=torch.int32)


class Gptq(nn.Module):
    """Lay a weight out as GPTQ does, all in buffers: eight codes in each int32, down the rows."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        draw = torch.randint(-(2**31), 2**31 - 1, (8, 64), generator=generator)
        self.register_buffer("qweight", draw.to(torch.int32))
        self.register_buffer("qzeros", torch.full((2, 8), 0x77777777, dtype=torch.int32))
        self.register_buffer("scales", torch.full((2, 64), 0.01, dtype=BF16))
        self.register_buffer("g_idx", torch.arange(64, dtype=torch.int32) // 32)

    def forward(self, x: Tensor) -> Tensor:
        codes = (self.qweight[:, None] >> SHIFTS[:, None]).bitwise_and(15).reshape(64, 64)
        zeros = (self.qzeros[:, :, None] >> SHIFTS).bitwise_and(15).reshape(2, 64)
        rows = self.g_idx.long()
        return x @ ((codes - zeros[rows]).to(x.dtype) * self.scales[rows])


class Fp8(nn.Module):
    """Stand for a linear layer of a fine-grained fp8 checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randn(64, 64).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.full((1, 1), 0.5, dtype=BF16))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype) * self.weight_scale_inv).t()


def bnb_4bit(**quantization: Any) -> nn.Module:
    module: nn.Module = testing.quantized_linear(torch.randn(64, 64, dtype=BF16), **quantization)
    return module


def bnb_8bit() -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    linear = bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False, threshold=0.0)
    module: nn.Module = linear.to("cpu")
    module(torch.randn(2, 64).to(BF16))  # quantizes in its first call
    return module


def torchao_int8() -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    linear = nn.Linear(64, 64, bias=False, dtype=BF16)
    quantization.quantize_(linear, quantization.Int8WeightOnlyConfig(set_inductor_config=False))
    return linear


def ours(k: int = 4, absmax: str = "e4m4") -> nn.Module:
    return kbit.KBitLinear(kbit.quantize(torch.randn(64, 64, dtype=BF16), k, absmax=absmax))


class Experts(nn.Module):
    def __init__(self, format: str) -> None:
        super().__init__()
        operands = pack(torch.randn(2, 64, 64), format)
        self.up_proj = ExpertStack(operands, format, (2, 64, 64), transposed=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.up_proj.dequantize(x.dtype)[0]
