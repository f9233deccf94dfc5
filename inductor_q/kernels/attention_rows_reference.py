"""Attention of a few queries that see the same keys in plain torch: the semantics."""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_q.kernels.provider import REFERENCE, Provider
from inductor_q.kernels.rows_calls import AttentionRows


class Reference(Provider[AttentionRows]):
    name = REFERENCE

    def run(self, call: AttentionRows) -> Tensor:
        attended = torch.nn.functional.scaled_dot_product_attention(
            call.query, call.key, call.value, attn_mask=call.mask, scale=call.scale
        )
        # Kernels differ in what they give where no key is seen.
        return torch.where(call.mask.any(-1, keepdim=True), attended, 0.0).contiguous()


KERNEL = Reference()
