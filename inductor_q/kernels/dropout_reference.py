"""Products of adapters under dropout in plain torch: the semantics."""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_q.kernels.dropout import keep_mask
from inductor_q.kernels.dropout_calls import DropoutGradA, DropoutGradX, DropoutProject
from inductor_q.kernels.provider import REFERENCE, Provider


class Project(Provider[DropoutProject]):
    name = REFERENCE

    def run(self, call: DropoutProject) -> Tensor:
        x, count = call.x, call.count
        low = [
            x.where(_keep(call, x, i), 0.0) @ a.t() / (1 - call.p)
            for i, a in enumerate(call.a.chunk(count))
        ]
        call.out.zero_()
        call.out[:, : call.a.shape[0]] = torch.cat(low, 1)
        return call.out


class GradA(Provider[DropoutGradA]):
    name = REFERENCE

    def run(self, call: DropoutGradA) -> Tensor:
        scale = 1 / (1 - call.p)
        parts = [
            grad.t() @ call.x.where(_keep(call, call.x, i), 0.0) * scale
            for i, grad in enumerate(call.grad.chunk(call.count, 1))
        ]
        return torch.cat(parts)


class GradX(Provider[DropoutGradX]):
    name = REFERENCE

    def run(self, call: DropoutGradX) -> Tensor:
        scale, of_x = 1 / (1 - call.p), call.new()
        # What is added to a product in 16 bits is rounded with it, and not before.
        dtype = torch.promote_types(of_x.dtype, torch.float32) if call.adds else of_x.dtype
        total = of_x.to(dtype) if call.adds else of_x.zero_()
        pairs = zip(call.a.chunk(call.count), call.grad.chunk(call.count, 1), strict=True)
        for i, (a, grad) in enumerate(pairs):
            total += (grad.to(dtype) @ a.to(dtype) * scale).where(_keep(call, total, i), 0.0)
        return of_x if total is of_x else of_x.copy_(total)


def _keep(call: DropoutProject | DropoutGradA | DropoutGradX, x: Tensor, adapter: int) -> Tensor:
    """Which elements an adapter keeps of an input that is as large as `x`."""
    rows, columns = x.shape
    return keep_mask(call.seeds[call.index], rows, columns, adapter, call.p)


PROJECT = Project()
GRAD_A = GradA()
GRAD_X = GradX()
