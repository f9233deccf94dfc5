"""Calls of the ops for experts as kernels get them, and the checks of their arguments."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from inductor_q.exc import WrongDtype, WrongShape
from inductor_q.formats import QuantFormat, get_format
from inductor_q.kernels.calls import DENSE, Call, alike, laid_out
from inductor_q.kernels.checks import check_device, check_operands, expect
from inductor_q.kernels.tile_map import check_tiles, height

#: The op's calls with products in FP8 have providers of their own.
IN_FP8 = "scatter2scatter_fp8"


class Stack:
    """The sizes of a stack of experts' weights: [E, N, K], or [E, K, N] where `transposed`."""

    shape: tuple[int, ...]
    transposed: bool

    @property
    def num_experts(self) -> int:
        return self.shape[0]

    @property
    def in_features(self) -> int:
        return self.shape[1 if self.transposed else 2]

    @property
    def out_features(self) -> int:
        return self.shape[2 if self.transposed else 1]


@dataclass(frozen=True, kw_only=True)
class Scatter2Scatter(Call, Stack):
    """One call as a kernel gets it: the arguments of `qfuse::scatter2scatter` in their order.

    The op's schema, its calls and its gradients all use these fields. A kernel returns the result
    and `x @ A_e'` [R, r] in grouped order ([R, 0] without adapters), both with zeros in nobody's
    rows (`ops/routing.py` has the words). With `row_scale`, a number for each row of the weights as
    they are stored, their products are in FP8, those of adapters never.
    """

    x: Tensor
    operands: Sequence[Tensor]
    format: str  # "dense", or the name of a format
    shape: tuple[int, ...]
    transposed: bool = False
    order: Tensor
    inverse: Tensor
    offsets: Tensor
    tiles: Tensor
    top_k: int
    grouped_in: bool = False
    grouped_out: bool = False
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    scaling: float = 1.0
    bias: Tensor | None = None
    gates: Tensor | None = None
    row_scale: Tensor | None = None

    @property
    def op(self) -> str:
        """Under which name `kernels.PROVIDERS` lists who serves it."""
        return "scatter2scatter" if self.row_scale is None else IN_FP8

    @functools.cached_property
    def fmt(self) -> QuantFormat | None:
        """The format of the weights; None where they are dense."""
        return None if self.format == DENSE else get_format(self.format)

    @property
    def device(self) -> torch.device:
        return self.x.device

    def empty(self) -> tuple[Tensor, Tensor] | None:
        return self.results() if self.rows == 0 else None

    def kind(self) -> Hashable:
        routing = (self.order, self.inverse, self.offsets, self.tiles)
        return (
            *(self.x.device, self.format, self.shape, self.transposed, self.rows, self.rank),
            *(self.top_k, self.grouped_in, self.grouped_out),
            alike(
                self.x, *routing, self.lora_a, self.lora_b, self.bias, self.gates, self.row_scale
            ),
            alike(*self.operands),
        )

    def results(self) -> tuple[Tensor, Tensor]:
        """Allocate the op's results."""
        rows = self.rows if self.grouped_out else self.tokens
        x = self.x
        return x.new_empty((rows, self.out_features)), x.new_empty((self.rows, self.rank))

    @property
    def rank(self) -> int:
        return 0 if self.lora_a is None else self.lora_a.shape[1]

    @property
    def rows(self) -> int:
        return self.order.shape[0]

    @functools.cached_property
    def tile_rows(self) -> int:
        """The most rows of one part of `tiles`; cached, since it queries the device."""
        return height(self.rows, self.num_experts, self.x.device)

    @property
    def tokens(self) -> int:
        return self.rows // self.top_k

    @property
    def rows_each(self) -> int:
        """The rows of one expert, were they as many as the others'."""
        return self.rows // max(1, self.num_experts)

    @property
    def gathered_bytes(self) -> int:
        """What the input's rows in grouped order take, where they are none yet."""
        return 0 if self.grouped_in else self.rows * self.in_features * self.x.itemsize

    @property
    def grouped_bytes(self) -> int:
        """What rows [R, N] take that are summed up by token, and so are no result."""
        return 0 if self.grouped_out else self.rows * self.out_features * self.x.itemsize

    @property
    def late_bytes(self) -> int:
        """What the result takes that is allocated only when rows are summed up by token."""
        return self.grouped_bytes // self.top_k

    def check(self) -> None:
        """Raise unless the arguments fit each other."""
        e, n, k = self.num_experts, self.out_features, self.in_features
        expect("weight of experts", self.shape, (self.offsets.shape[0] - 1, *self.shape[1:]))
        rows = self.rows if self.grouped_in else self.tokens
        expect("input of experts", self.x.shape, (rows, k))
        if (self.lora_a is None) != (self.lora_b is None):
            raise WrongShape(what="adapter", expected="both A and B, or none", got="one of them")
        if self.lora_a is not None and self.lora_b is not None:
            expect("adapter A of experts", self.lora_a.shape, (e, self.rank, k))
            expect("adapter B of experts", self.lora_b.shape, (e, n, self.rank))
            check_device("adapter", [self.lora_a, self.lora_b], self.x)
        if self.bias is not None:
            expect("bias of experts", self.bias.shape, (e, n))
            check_device("bias", [self.bias], self.x)
        if self.gates is not None:
            expect("gates", self.gates.shape, (self.tokens, self.top_k))
            check_device("gates", [self.gates], self.x)
        if self.row_scale is not None:
            self._check_row_scale(self.row_scale)
        check_device("routing", [self.order, self.inverse, self.offsets, self.tiles], self.x)
        check_order(self.order)
        check_tiles(self.tiles, self.rows, self.num_experts)
        check_device("weight", self.operands, self.x)
        if self.fmt is not None:
            check_operands(self.operands, self.fmt, self.shape, self.x.dtype)
        else:
            expect("dense weight", self.operands[0].shape, self.shape)
            if not self.x.dtype.is_floating_point:
                raise WrongDtype(what="input of experts", expected="floating", got=self.x.dtype)

    def _check_row_scale(self, scale: Tensor) -> None:
        expect("scales of the rows of experts", scale.shape, (self.shape[0] * self.shape[1],))
        check_device("scales of rows", [scale], self.x)
        if scale.dtype is not torch.float32:
            raise WrongDtype(what="scales of rows", expected=torch.float32, got=scale.dtype)


def check_order(order: Tensor) -> None:
    """Raise unless kernels can read `order` as it lies: a routing's, [R] int64."""
    if order.dtype is not torch.int64:
        raise WrongDtype(what="order of a routing", expected=torch.int64, got=order.dtype)


#: The names of the op's arguments, and the values of those that may be left out.
ARGUMENTS = tuple(field.name for field in fields(Scatter2Scatter))


DEFAULTS = {f.name: f.default for f in fields(Scatter2Scatter) if f.default is not MISSING}


def arguments(**named: Any) -> tuple[Any, ...]:
    """Put the arguments of `qfuse::scatter2scatter` in its order: tensors, or nodes of a graph."""
    given = {**DEFAULTS, **named}
    return tuple([given[name] for name in ARGUMENTS])


def unchecked(args: Sequence[Any]) -> Scatter2Scatter:
    """Make a call of the op's arguments, without checks."""
    call = object.__new__(Scatter2Scatter)  # `__init__` sets 19 fields of a frozen class one by one
    vars(call).update(zip(ARGUMENTS, args, strict=True))
    vars(call)["shape"] = tuple(call.shape)
    return call


@dataclass(frozen=True)
class TileMap(Call):
    """One call as a kernel gets it: the arguments of `tile_map`, checked."""

    offsets: Tensor
    rows: int

    @property
    def device(self) -> torch.device:
        return self.offsets.device

    def kind(self) -> Hashable:
        return self.offsets.device, self.rows, laid_out(self.offsets)

    @property
    def num_experts(self) -> int:
        return self.offsets.shape[0] - 1


@dataclass(frozen=True)
class GroupedGram(Call):
    """One call as a kernel gets it: the arguments of `grouped_gram`, checked."""

    left: Tensor
    right: Tensor
    order: Tensor
    offsets: Tensor
    top_k: int
    grouped_left: bool
    grouped_right: bool
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.order.shape[0]

    @property
    def device(self) -> torch.device:
        return self.left.device

    def empty(self) -> Tensor | None:
        return None if self.rows else self.left.new_zeros(self.shape, dtype=self.dtype)

    def kind(self) -> Hashable:
        return (
            *(self.left.device, self.top_k, self.grouped_left, self.grouped_right, self.dtype),
            laid_out(self.left, self.right, self.order, self.offsets),
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.offsets.shape[0] - 1, self.left.shape[1], self.right.shape[1]

    def check(self) -> None:
        check_order(self.order)
        for what, side, grouped in (
            ("left side of grouped_gram", self.left, self.grouped_left),
            ("right side of grouped_gram", self.right, self.grouped_right),
        ):
            rows = self.rows if grouped else self.rows // self.top_k
            if side.dim() != 2 or side.shape[0] != rows:
                raise WrongShape(what=what, expected=(rows, "..."), got=tuple(side.shape))
