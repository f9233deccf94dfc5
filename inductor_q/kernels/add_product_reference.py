"""A product added to a matrix by torch: cuBLAS on a GPU."""

from __future__ import annotations

import torch

from inductor_q.kernels.calls import AddProduct
from inductor_q.kernels.provider import REFERENCE, Provider


class Reference(Provider[AddProduct]):
    name = REFERENCE

    def run(self, call: AddProduct) -> None:
        # Out of place it would copy first.
        torch.addmm(call.base, call.a, call.b, alpha=call.alpha, out=call.base)


KERNEL = Reference()
