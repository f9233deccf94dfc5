"""Calls of the ops for a few rows as kernels get them, and the checks of their arguments."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inductor_q.exc import WrongDtype
from inductor_q.formats import QuantFormat
from inductor_q.kernels.calls import Call, alike, laid_out
from inductor_q.kernels.checks import check_device, expect


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter of a linear layer, which adds `scaling * (x @ a.t()) @ b.t()`."""

    a: Tensor  # [r, K]
    b: Tensor  # [N, r]
    scaling: float


@dataclass(frozen=True)
class LinearRows(Call):
    """One call as a kernel gets it: return `x @ weight.t()` of each weight with what is added, each
    contiguous, for a few rows; where `gated`, `silu(first) * second` of two alone."""

    x: Tensor  # [M, K]
    weights: Sequence[Sequence[Tensor]]  # operands of weights [N_i, K]
    fmt: QuantFormat
    features: Sequence[int]  # N_i
    biases: Sequence[Tensor | None]  # [N_i], in the dtype of x
    adapters: Sequence[Adapter | None]
    gated: bool = False

    @property
    def device(self) -> torch.device:
        return self.x.device

    def outputs(self) -> list[Tensor]:
        """Return memory for the results."""
        features = self.features[:1] if self.gated else self.features
        return [self.x.new_empty((self.x.shape[0], count)) for count in features]

    def empty(self) -> list[Tensor] | None:
        return None if self.x.shape[0] and sum(self.features) else self.outputs()

    def kind(self) -> Hashable:
        low = [a and (a.scaling, laid_out(a.a, a.b)) for a in self.adapters]
        return (
            *(self.x.device, self.fmt, tuple(self.features), self.gated, laid_out(self.x), *low),
            *[bias if bias is None else laid_out(bias) for bias in self.biases],
            *[alike(*operands) for operands in self.weights],
        )


@dataclass(frozen=True)
class AttentionRows(Call):
    """One call as a kernel gets it: return attention of a few queries that see the same keys,
    [B, G, R, D] and contiguous. Queries that see no key give zero."""

    query: Tensor  # [B, G, R, D]
    key: Tensor  # [B, G, K, D]
    value: Tensor  # [B, G, K, D]
    mask: Tensor  # [B, 1, 1, K] or [1, 1, 1, K], bool
    scale: float

    @property
    def device(self) -> torch.device:
        return self.query.device

    def check(self) -> None:
        """Raise unless the tensors fit."""
        (b, g, _, d), (keys, rows) = self.query.shape, (self.key.shape[2], self.mask.shape[0])
        expect("key", self.key.shape, (b, g, keys, d))
        expect("value", self.value.shape, (b, g, keys, d))
        expect("mask", self.mask.shape, (1 if rows == 1 else b, 1, 1, keys))
        dtype = self.query.dtype
        dtypes = {"key": dtype, "value": dtype, "mask": torch.bool}
        for name, expected in dtypes.items():
            if (got := getattr(self, name).dtype) is not expected:
                raise WrongDtype(what=name, expected=expected, got=got)
        check_device("attention_rows", (self.key, self.value, self.mask), self.query)

    def result(self) -> Tensor:
        """Return memory for the result."""
        return torch.empty_like(self.query, memory_format=torch.contiguous_format)

    def empty(self) -> Tensor | None:
        return None if self.query.numel() and self.key.numel() else self.result().zero_()

    def kind(self) -> Hashable:
        layout = laid_out(self.query, self.key, self.value, self.mask)
        return self.query.device, self.scale, layout
