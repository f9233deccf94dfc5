"""The loss of rows of logits and its gradient on a GPU: a program reads its row twice."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools
from typing import Any

from inductor_q.kernels.calls import SoftmaxLoss
from inductor_q.kernels.gpu import on
from inductor_q.kernels.provider import TritonProvider

BLOCK = 4096
WARPS = 8


class Triton(TritonProvider[SoftmaxLoss]):
    def refuses(self, call: SoftmaxLoss) -> str:
        return "" if call.logits.stride(1) == 1 else "the logits of a row lie apart"

    def run(self, call: SoftmaxLoss) -> None:
        rows, columns = call.logits.shape
        with on(call.device):
            _kernel()[(rows,)](
                call.logits,
                call.labels.contiguous(),
                call.losses,
                call.losses if call.scale is None else call.scale,
                columns,
                call.logits.stride(0),
                call.ignore_index,
                GRADIENT=call.scale is not None,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def softmax_loss(
        logits,
        labels,
        losses,
        scale,
        columns,
        stride,
        ignore_index,
        GRADIENT: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0)
        label = tl.load(labels + row)
        logits += row.to(tl.int64) * stride
        counts = label != ignore_index
        known = (label >= 0) & (label < columns)
        # Read before any program of the row writes: the reductions below wait for all of them.
        chosen = tl.load(logits + label, mask=known & counts, other=0.0).to(tl.float32)
        lanes = tl.arange(0, BLOCK)
        high = -float("inf")
        total = 0.0
        for start in range(0, columns, BLOCK):
            inside = start + lanes < columns
            x = tl.load(logits + start + lanes, mask=inside, other=-float("inf")).to(tl.float32)
            new = tl.maximum(high, tl.max(x))
            total = total * tl.exp(high - new) + tl.sum(tl.exp(x - new))
            high = new
        normalizer = high + tl.log(total)
        loss = tl.where(known, normalizer - chosen, float("nan"))
        tl.store(losses + row, tl.where(counts, loss, 0.0))
        if GRADIENT:
            factor = tl.load(scale)
            for start in range(0, columns, BLOCK):
                inside = start + lanes < columns
                x = tl.load(logits + start + lanes, mask=inside, other=0.0).to(tl.float32)
                gradient = tl.exp(x - normalizer) - (start + lanes == label).to(tl.float32)
                gradient = tl.where(counts, gradient * factor, 0.0)
                tl.store(logits + start + lanes, gradient, mask=inside)

    return softmax_loss


KERNEL = Triton()
