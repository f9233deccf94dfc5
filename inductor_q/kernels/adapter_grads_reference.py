"""Both gradients of an adapter's second product by torch: cuBLAS on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_q.kernels.calls import AdapterGrads
from inductor_q.kernels.provider import REFERENCE, Provider


class Reference(Provider[AdapterGrads]):
    name = REFERENCE

    def run(self, call: AdapterGrads) -> None:
        rank = call.b.shape[1]
        _multiply(call.grad, call.b, call.factor_p, call.of_p[:, :rank])
        call.of_p[:, rank:].zero_()
        _multiply(call.grad.t(), call.p, call.factor_b, call.of_b)


def _multiply(left: Tensor, right: Tensor, factor: float, out: Tensor) -> None:
    if factor == 1.0:
        torch.mm(left, right, out=out)
    else:  # the product is multiplied before it is rounded, and `out` is not read
        torch.addmm(out, left, right, beta=0, alpha=factor, out=out)


KERNEL = Reference()
