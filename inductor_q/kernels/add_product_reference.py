"""A product added to a matrix by torch: cuBLAS on a GPU."""

from __future__ import annotations

import torch

from inductor_q.kernels.calls import AddProduct
from inductor_q.kernels.provider import REFERENCE, Provider


class Reference(Provider[AddProduct]):
    name = REFERENCE

    def run(self, call: AddProduct) -> None:
        torch.addmm(call.base, call.a, call.b, out=call.base)  # out of place it would copy first


KERNEL = Reference()
