"""Calls of the ops under dropout as kernels get them, and the checks of their arguments."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from inductor_q.exc import WrongDtype, WrongShape
from inductor_q.kernels.calls import Call, laid_out
from inductor_q.kernels.checks import DTYPES, check_device, expect


@dataclass(frozen=True)
class DropoutProject(Call):
    """One call as a kernel gets it: write the projections of `x` under dropout into `out`.

    `out` [M, count * r + padding] has any row stride; the columns behind the projections become
    zero.
    """

    x: Tensor
    seeds: Tensor
    index: int
    a: Tensor
    count: int
    p: float
    out: Tensor

    @property
    def device(self) -> torch.device:
        return self.x.device

    def empty(self) -> Tensor | None:
        return None if self.out.numel() else self.out

    def kind(self) -> Hashable:
        layout = laid_out(self.x, self.seeds, self.a, self.out)
        return self.x.device, self.index, self.count, self.p, layout

    def check(self) -> None:
        x, a, count = self.x, self.a, self.count
        if x.dim() != 2 or a.dim() != 2 or a.shape[1] != x.shape[1] or _rest(a, 0, count):
            operands = f"a [{count} * r, K] and x [M, K]"
            got = f"a {tuple(a.shape)} and x {tuple(x.shape)}"
            raise WrongShape(what="projection under dropout", expected=operands, got=got)
        check_dropped(x, a, self.seeds, self.index, self.p)
        rows, columns = self.out.shape
        if rows != self.x.shape[0] or columns < self.a.shape[0]:
            expected = (self.x.shape[0], f">= {self.a.shape[0]}")
            raise WrongShape(what="out", expected=expected, got=(rows, columns))
        if self.out.dtype != self.x.dtype:
            raise WrongDtype(what="out", expected=self.x.dtype, got=self.out.dtype)


@dataclass(frozen=True)
class DropoutGradA(Call):
    """One call as a kernel gets it: the arguments of `dropout_grad_a`, checked."""

    x: Tensor
    seeds: Tensor
    index: int
    grad: Tensor
    count: int
    p: float

    @property
    def device(self) -> torch.device:
        return self.x.device

    def empty(self) -> Tensor | None:
        return None if self.x.numel() else self.new().zero_()

    def kind(self) -> Hashable:
        layout = laid_out(self.x, self.seeds, self.grad)
        return self.x.device, self.index, self.count, self.p, layout

    def new(self) -> Tensor:
        """Allocate the gradient of the adapters' A, [count * r, K]."""
        return self.x.new_empty((self.grad.shape[1], self.x.shape[1]))

    def check(self) -> None:
        x, grad = self.x, self.grad
        if x.dim() != 2 or grad.dim() != 2 or len(x) != len(grad) or _rest(grad, 1, self.count):
            expected = f"x [M, K] and a gradient [M, {self.count} * r]"
            got = f"x {tuple(x.shape)} and {tuple(grad.shape)}"
            raise WrongShape(what="gradient of projections", expected=expected, got=got)
        check_dropped(x, grad, self.seeds, self.index, self.p)


@dataclass(frozen=True)
class DropoutGradX(Call):
    """One call as a kernel gets it: the arguments of `dropout_grad_x`, checked."""

    #: Whether `new` returns a tensor that the gradient is added to, in place.
    adds: ClassVar[bool] = False

    a: Tensor
    seeds: Tensor
    index: int
    grad: Tensor
    count: int
    p: float

    @property
    def device(self) -> torch.device:
        return self.a.device

    def empty(self) -> Tensor | None:
        return None if self.grad.numel() and self.a.numel() else self.new().zero_()

    def kind(self) -> Hashable:
        layout = laid_out(self.a, self.seeds, self.grad)
        return self.a.device, self.index, self.count, self.p, layout

    def new(self) -> Tensor:
        """Allocate the gradient of the input, [M, K]."""
        return self.a.new_empty((self.grad.shape[0], self.a.shape[1]))

    def check(self) -> None:
        a, grad = self.a, self.grad
        if a.dim() != 2 or grad.dim() != 2 or len(a) != grad.shape[1] or _rest(a, 0, self.count):
            expected = f"a [{self.count} * r, K] and a gradient [M, {self.count} * r]"
            got = f"a {tuple(a.shape)} and {tuple(grad.shape)}"
            raise WrongShape(what="gradient of projections", expected=expected, got=got)
        check_dropped(a, grad, self.seeds, self.index, self.p)


@dataclass(frozen=True)
class AddDropoutGradX(DropoutGradX):
    """One call as a kernel gets it: add what `DropoutGradX` computes to `base`, rounded once."""

    adds: ClassVar[bool] = True

    base: Tensor  # [M, K], overwritten by the sum

    def empty(self) -> Tensor | None:
        return None if self.grad.numel() and self.a.numel() else self.base

    def kind(self) -> Hashable:
        return super().kind(), laid_out(self.base)

    def new(self) -> Tensor:
        return self.base

    def check(self) -> None:
        super().check()
        expect("the sum", self.base.shape, (self.grad.shape[0], self.a.shape[1]))
        if self.base.dtype != self.a.dtype:
            raise WrongDtype(what="the sum", expected=self.a.dtype, got=self.base.dtype)
        check_device("the sum", [self.base], self.a)


def _rest(adapters: Tensor, dim: int, count: int) -> int:
    """How many of the ranks are left over when `count` adapters share them."""
    return int(adapters.shape[dim] % max(count, 1))


def check_dropped(one: Tensor, other: Tensor, seeds: Tensor, index: int, p: float) -> None:
    """Raise unless two factors can be multiplied under a mask of dropout made from the seeds."""
    if one.dtype not in DTYPES or other.dtype != one.dtype:
        expected = f"factors of one dtype out of {DTYPES}"
        got = f"{other.dtype} and {one.dtype}"
        raise WrongDtype(what="product under dropout", expected=expected, got=got)
    if seeds.dtype is not torch.int64:
        raise WrongDtype(what="seeds", expected=torch.int64, got=seeds.dtype)
    if seeds.dim() != 1 or not 0 <= index < seeds.shape[0]:
        raise WrongShape(what="seeds", expected=f"({index + 1} or more,)", got=tuple(seeds.shape))
    if not 0 <= p < 1:
        raise WrongShape(what="share of dropped elements", expected="0 <= p < 1", got=p)
    check_device("product under dropout", [other, seeds], one)
