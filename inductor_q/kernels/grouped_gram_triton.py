"""The Gram products of adapters on a GPU: one program per expert and block of columns, no copies.

The narrow side (the rank) stays in registers as rows of a small tile; the wide side is read once,
through the routing where it is not grouped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_q.kernels.expert_calls import GroupedGram
from inductor_q.kernels.gpu import on
from inductor_q.kernels.provider import TritonProvider

NARROW = 64  # columns of the narrow side that one program holds
WIDTH = 128
ROWS = 64


class Triton(TritonProvider[GroupedGram]):
    def refuses(self, call: GroupedGram) -> str:
        if min(call.left.shape[1], call.right.shape[1]) > NARROW:
            return f"neither side has at most {NARROW} columns"
        if call.left.dtype != call.right.dtype or call.left.dtype.itemsize != 2:
            return "both sides must have one 16-bit dtype"
        return ""

    def run(self, call: GroupedGram) -> Tensor:
        import triton

        from inductor_q.kernels.expert_rows_triton import gram

        out = torch.empty(call.shape, dtype=call.dtype, device=call.left.device)
        sides = [
            (call.left.contiguous(), call.grouped_left, out.stride(1)),
            (call.right.contiguous(), call.grouped_right, out.stride(2)),
        ]
        (narrow, narrow_grouped, narrow_stride), (wide, wide_grouped, wide_stride) = sorted(
            sides, key=lambda side: side[0].shape[1]
        )
        rank, features = narrow.shape[1], wide.shape[1]
        with on(out.device):
            gram[(triton.cdiv(features, WIDTH), call.shape[0])](
                narrow,
                wide,
                call.order.contiguous(),
                call.offsets,
                out,
                rank,
                features,
                out.stride(0),
                narrow_stride,
                wide_stride,
                ROWS=ROWS,
                RANK=max(16, triton.next_power_of_2(rank)),
                WIDTH=WIDTH,
                NARROW_TOP_K=0 if narrow_grouped else call.top_k,
                WIDE_TOP_K=0 if wide_grouped else call.top_k,
                num_warps=4,
                num_stages=4,
            )
        return out


KERNEL = Triton()
