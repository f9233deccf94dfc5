"""The loss of rows of logits and its gradient in plain torch: the semantics."""

from __future__ import annotations

import torch

from inductor_q.kernels.calls import SoftmaxLoss
from inductor_q.kernels.provider import REFERENCE, Provider


class Reference(Provider[SoftmaxLoss]):
    name = REFERENCE

    def run(self, call: SoftmaxLoss) -> None:
        counts = call.labels != call.ignore_index
        known = counts & (call.labels >= 0) & (call.labels < call.logits.shape[1])
        label = torch.where(known, call.labels, 0).unsqueeze(1)
        logits = call.logits.float()
        total = logits.logsumexp(1, keepdim=True)
        loss = (total - logits.gather(1, label)).squeeze(1)
        loss = torch.where(known, loss, torch.nan)
        call.losses.copy_(torch.where(counts, loss, 0.0))
        if call.scale is None:
            return
        # The one pass over a float32 copy that is left is made in place.
        gradient = logits.clone() if logits is call.logits else logits
        gradient.sub_(total).exp_()
        gradient.scatter_add_(1, label, torch.full_like(total, -1.0))
        gradient.mul_(call.scale).masked_fill_(~counts.unsqueeze(1), 0.0)
        call.logits.copy_(gradient)


KERNEL = Reference()
