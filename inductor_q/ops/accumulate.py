"""`qfuse::accumulate`: a product added to a matrix, where that matrix lies.

`accumulate(out, a, b) = out + a @ b`, rounded once. `addmm` says the same, but Inductor gives its
result a buffer of its own and copies `out` into it; here the lowering writes into the buffer of
`out` where nothing else reads it (`inductor_q.lowerings.accumulate`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inductor_q.ops.library import define, define_autograd


def _accumulate(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(out, a, b)


def _fake(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(out, a, b)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, a, b = inputs
    ctx.save_for_backward(a, b)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a, b = ctx.saved_tensors
    return grad, grad @ b.t(), a.t() @ grad


def define_accumulate() -> None:
    define("accumulate(Tensor out, Tensor a, Tensor b) -> Tensor", _accumulate, _fake)
    define_autograd("accumulate", _backward, _setup_context)
