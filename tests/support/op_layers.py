"""Make quantized linear layers with adapters, and their formula in eager mode and in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from inductor_q import ops
from tests.support.quantized import Quantized, by_table, quantize


@dataclass
class Layer:
    """Hold a quantized linear layer with adapters, as arguments of `ops.lora_linear`."""

    w: Quantized
    x: Tensor
    a: list[Tensor]
    b: list[Tensor]
    scaling: list[float]
    bias: Tensor | None

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, *self.a, *self.b, *([] if self.bias is None else [self.bias])]

    def __call__(self) -> Tensor:
        return ops.lora_linear(
            self.x, *self.w.operands, self.a, self.b, self.scaling, bias=self.bias
        )


def layer(
    lead: Sequence[int] = (5,),
    *,
    n: int = 48,
    k: int = 64,
    ranks: Sequence[int] = (4,),
    dtype: torch.dtype = torch.float32,
    adapter: torch.dtype | None = None,
    bias: bool = True,
    seed: int = 0,
    device: str = "cpu",
) -> Layer:
    """Make a seeded layer; B is not zero, so every gradient is alive."""
    generator = torch.Generator().manual_seed(seed)

    def leaf(shape: Sequence[int], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        value = torch.randn(tuple(shape), generator=generator, dtype=torch.float64) * scale
        return value.to(device, dtype).requires_grad_()

    adapter = adapter or dtype
    return Layer(
        w=quantize((n, k), dtype=dtype, seed=seed, device=device),
        x=leaf((*lead, k), dtype),
        a=[leaf((r, k), adapter, k**-0.5) for r in ranks],
        b=[leaf((n, r), adapter, 0.1) for r in ranks],
        scaling=[0.5 + i for i in range(len(ranks))],
        bias=leaf((n,), dtype) if bias else None,
    )


def gradients(y: Tensor, leaves: Sequence[Tensor], seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device, y.dtype)
    return list(torch.autograd.grad(y, leaves, grad))


def by_hand(case: Layer) -> Tensor:
    """Compute eager mode's formula: bitsandbytes' layer and PEFT's `Linear4bit.forward`."""
    weight = by_table(case.w.packed, case.w.state).to(case.x.dtype)
    result = F.linear(case.x, weight, case.bias)
    for a, b, s in zip(case.a, case.b, case.scaling, strict=True):
        result = result + (F.linear(F.linear(case.x.to(a.dtype), a), b) * s).to(result.dtype)
    return result


def exact(case: Layer) -> tuple[Tensor, list[Tensor]]:
    """Return output and gradients in float64."""

    def double(x: Tensor) -> Tensor:
        return x.detach().double().requires_grad_()

    weight = by_table(case.w.packed, case.w.state).double()
    x, a, b = double(case.x), [double(t) for t in case.a], [double(t) for t in case.b]
    bias = None if case.bias is None else double(case.bias)
    y = F.linear(x, weight, bias)
    for a_i, b_i, s in zip(a, b, case.scaling, strict=True):
        y = y + (x @ a_i.t()) @ b_i.t() * s
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(case.x.dtype)
    leaves = [x, *a, *b, *([] if bias is None else [bias])]
    return y, list(torch.autograd.grad(y, leaves, grad.double()))


def error(actual: Tensor, expected: Tensor) -> float:
    return float(((actual.double() - expected).norm() / expected.norm()).detach())
