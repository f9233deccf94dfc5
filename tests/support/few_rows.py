"""Calls of a few rows, and a kernel for them on a CPU, so that graphs are those of a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from inductor_q.decode.eager import Eager
from inductor_q.formats import QuantFormat
from inductor_q.kernels import PROVIDERS, linear_rows_reference
from inductor_q.kernels.rows_calls import Adapter, LinearRows
from tests.support.quantized import random_weight, sample


class Packed(linear_rows_reference.Reference):
    """The reference, under the name of a kernel that reads packed weights."""

    def __init__(self, name: str) -> None:
        self.name = name


def serve_rows(monkeypatch: pytest.MonkeyPatch, name: str = "packed") -> None:
    table = PROVIDERS["linear_rows"]
    monkeypatch.setitem(PROVIDERS, "linear_rows", {**table, "cpu": (Packed(name), *table["cpu"])})


def made(
    fmt: QuantFormat,
    shape: tuple[int, int],
    rows: int,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    bias: bool = False,
    ranks: Sequence[int] = (0,),
    adapter: torch.dtype | None = None,
    gated: bool = False,
) -> tuple[LinearRows, list[Tensor]]:
    """Make a call, and its results in float64: of a weight of `shape` for each of `ranks`, with an
    adapter where that is not 0."""
    generator = torch.Generator().manual_seed(rows)

    def random(*sizes: int, of: torch.dtype = dtype, scale: float = 1.0) -> Tensor:
        return (torch.randn(*sizes, generator=generator) * scale).to(device, of)

    x = random(rows, shape[1])
    weights: list[list[Tensor]] = []
    biases: list[Tensor | None] = []
    adapters: list[Adapter | None] = []
    exact: list[Tensor] = []
    for i, rank in enumerate(ranks):
        operands, values = finite(fmt, shape, i, like_trained=gated)
        weights.append([operand.to(device) for operand in operands])
        biases.append(random(shape[0]) if bias else None)
        result = x.double() @ values.double().to(device).t()
        added = biases[-1]
        result = result if added is None else result + added.double()
        adapters.append(None)
        if rank:
            of = adapter or dtype
            a = random(rank, shape[1], of=of, scale=shape[1] ** -0.5)
            b = random(shape[0], rank, of=of, scale=0.1)
            adapters[-1] = Adapter(a, b, 2.0)
            result = result + 2.0 * (x.double() @ a.double().t()) @ b.double().t()
        exact.append(result)
    exact = [F.silu(exact[0]) * exact[1]] if gated else exact
    features = [shape[0]] * len(ranks)
    return LinearRows(x, weights, fmt, features, biases, adapters, gated), exact


def error(out: Tensor, exact: Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


def finite(
    fmt: QuantFormat, shape: tuple[int, int], seed: int, *, like_trained: bool = False
) -> tuple[list[Tensor], Tensor]:
    """Make operands of a weight and its float32 values, which are neither infinite nor NaN.

    Scales of e4m4 are any bytes. With those, the products of two layers go from 1e-300 to 1e5, so
    that the rounding of one decides what the error is. `like_trained`: from 2^-6 to 2^-4.
    """
    if fmt.name.startswith(("fp8", "mx", "nvfp4")):
        operands = random_weight(fmt.name, shape, seed)
        if fmt.in_bytes:
            operands[0] &= 0xBF  # below 2
    else:
        operands, values = sample(fmt, shape, seed=seed)
        if not (like_trained and fmt.planes and fmt.name.endswith("e4m4")):
            return operands, values
        operands[1] = operands[1] % 32 + 0x50
    named = dict(zip(fmt.operands, operands, strict=True))
    values = fmt.decode(Eager(named, shape[1], shape[0]), torch.arange(math.prod(shape)))
    return operands, values.reshape(shape)
