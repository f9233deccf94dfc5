"""`qfuse::adapter_grads`: what backward multiplies with the gradient of a layer, in one read of it.

A layer adds `p B'` of its adapter to its output, where p = x A'. Its gradient dY is multiplied
twice: `dY B` is the gradient of p, and `dY' p` that of B. Both results have a few columns, so that
reading dY takes most of the time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_q.kernels.calls import AdapterGrads
from inductor_q.kernels.dispatch import serve
from inductor_q.ops.library import define


def adapter_grads(
    grad: Tensor, p: Tensor, b: Tensor, factor_p: float, factor_b: float
) -> tuple[Tensor, Tensor]:
    """Return `factor_p * (grad @ b)` and `factor_b * (grad' @ p)`, each rounded once.

    Args:
        grad: [M, N], the gradient of a layer's output.
        p: [M, r], the projection of the layer's input, in the dtype of `grad`.
        b: [N, r], in the dtype of `grad`.
        factor_p, factor_b: the scaling of the adapter, where it is not in `p` or `b`.

    Returns:
        [M, r] and [N, r] in the dtype of `grad`, each contiguous.
    """
    of_p, of_b = (grad.new_empty((size, b.shape[-1])) for size in (grad.shape[0], grad.shape[-1]))
    call = AdapterGrads(grad, p, b, factor_p, factor_b, of_p, of_b)
    call.check()
    serve("adapter_grads", call)
    return of_p, of_b


def _fake(
    grad: Tensor, p: Tensor, b: Tensor, factor_p: float, factor_b: float
) -> tuple[Tensor, Tensor]:
    return torch.mm(grad, b), torch.mm(grad.t(), p)


def define_adapter_grads() -> None:
    arguments = "Tensor grad, Tensor p, Tensor b, float factor_p, float factor_b"
    define(f"adapter_grads({arguments}) -> (Tensor, Tensor)", adapter_grads, _fake)
