"""Products of adapters under dropout in plain torch: the semantics."""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_q.kernels.calls import DropoutGrad, DropoutProject
from inductor_q.kernels.dropout import keep_mask
from inductor_q.kernels.provider import REFERENCE, Provider


class Project(Provider[DropoutProject]):
    name = REFERENCE

    def run(self, call: DropoutProject) -> Tensor:
        x, count = call.x, call.count
        low = [
            x.where(_keep(call, i), 0.0) @ a.t() / (1 - call.p)
            for i, a in enumerate(call.a.chunk(count))
        ]
        call.out.zero_()
        call.out[:, : call.a.shape[0]] = torch.cat(low, 1)
        return call.out


class Grad(Provider[DropoutGrad]):
    name = REFERENCE

    def run(self, call: DropoutGrad) -> tuple[Tensor, Tensor]:
        scale = 1 / (1 - call.p)
        of_a = []
        of_x = call.new_of_x().zero_()
        pairs = zip(call.a.chunk(call.count), call.grad.chunk(call.count, 1), strict=True)
        for i, (a, grad) in enumerate(pairs):
            keep = _keep(call, i)
            of_a.append(grad.t() @ call.x.where(keep, 0.0) * scale)
            if call.of_x:
                of_x += (grad @ a * scale).where(keep, 0.0)
        return torch.cat(of_a), of_x


def _keep(call: DropoutProject | DropoutGrad, adapter: int) -> Tensor:
    rows, columns = call.x.shape
    return keep_mask(call.seeds[call.index], rows, columns, adapter, call.p)


PROJECT = Project()
GRAD = Grad()
