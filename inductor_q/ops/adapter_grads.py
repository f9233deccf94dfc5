"""`qfuse::adapter_grads`: what backward multiplies with the gradient of a layer, in one read of it.

A layer adds `p B'` of its adapter to its output, where p = x A'. Its gradient dY is multiplied
twice: `dY B` is the gradient of p, and `dY' p` that of B. dY is the largest matrix of the layer,
and both results have a few columns.
"""

from __future__ import annotations

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
        p: [M, r], the projection of its input, in the dtype of `grad`.
        b: [N, r], in the dtype of `grad`.
        factor_p, factor_b: the scaling of the adapter, where it is not in `p` or `b`.

    Returns:
        [M, r] and [N, r] in the dtype of `grad`, each contiguous.
    """
    results = _new(grad, p, b, factor_p, factor_b)
    adapter_grads_out(grad, p, b, factor_p, factor_b, *results)
    return results


def adapter_grads_out(
    grad: Tensor,
    p: Tensor,
    b: Tensor,
    factor_p: float,
    factor_b: float,
    of_p: Tensor,
    of_b: Tensor,
) -> None:
    """Write the results into `of_p`, which may be columns of a wider matrix, and into `of_b`. Where
    `of_p` has more than r columns, zeros are written behind them."""
    serve("adapter_grads", AdapterGrads(grad, p, b, factor_p, factor_b, of_p, of_b))


def _new(
    grad: Tensor, p: Tensor, b: Tensor, factor_p: float, factor_b: float
) -> tuple[Tensor, Tensor]:
    return grad.new_empty((grad.shape[0], b.shape[1])), grad.new_empty((grad.shape[1], p.shape[1]))


def define_adapter_grads() -> None:
    arguments = "Tensor grad, Tensor p, Tensor b, float factor_p, float factor_b"
    define(f"adapter_grads({arguments}) -> (Tensor, Tensor)", adapter_grads, _new)
