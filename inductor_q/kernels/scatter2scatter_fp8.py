"""scatter2scatter in FP8: experts decoded to e4m3 at once, and torch's grouped GEMM over them.

All experts are in memory while it runs, a byte for each weight. The rows of the input are gathered
and cast in one pass, with a scale each. Where the product sums over the rows of the weights as they
are stored, along which their scales differ (the gradient of x), these are multiplied into the input
before its cast, and the weights are decoded transposed. An adapter's product is added in place.
"""

from __future__ import annotations

import functools
import importlib.util
import math

import torch
from torch import Tensor

from inductor_q.formats import QuantFormat
from inductor_q.kernels.calls import Requantize
from inductor_q.kernels.expert_calls import Scatter2Scatter
from inductor_q.kernels.gpu import kept, on
from inductor_q.kernels.provider import DENSE_WEIGHT, Provider

CAPABILITY = (9, 0)  # torch's kernel is made of Hopper's instructions
ALIGNMENT = 16  # features of a row of 16 bytes
MAX_RANK = 64  # the adapter's product takes all of it at once
MOST = 2**31  # elements of a stack: larger ones were not tried


class Fp8(Provider[Scatter2Scatter]):
    name = "scaled_grouped_mm"
    decodes_first = True

    def missing(self) -> str:
        if not hasattr(torch, "_scaled_grouped_mm"):
            return "this torch has no _scaled_grouped_mm"
        return "" if importlib.util.find_spec("triton") else "triton is not installed"

    def unknown(self, fmt: QuantFormat | None) -> str:
        return DENSE_WEIGHT if fmt is None else ""

    def refuses(self, call: Scatter2Scatter) -> str:
        if refused := self.unknown(call.fmt):
            return refused
        if call.x.dtype is not torch.bfloat16:
            return f"the input is {call.x.dtype}, not bfloat16"
        if any(n % ALIGNMENT for n in call.shape[1:]):
            return f"features {call.shape[1:]} are no multiples of {ALIGNMENT}"
        if (elements := math.prod(call.shape)) >= MOST:
            return f"a stack of {elements} elements; {MOST} and more were not tried"
        if call.rank > MAX_RANK:
            return f"rank {call.rank} is over {MAX_RANK}"
        device = call.x.device
        if device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY:
            return "torch's grouped GEMM in FP8 is for compute capability 9.0 (Hopper)"
        return ""

    def workspace(self, call: Scatter2Scatter) -> int:
        """Count the input's rows and all experts in e4m3, which are gone before rows are summed."""
        scaled = call.rows * -(-call.rank // 16) * 16 * call.x.itemsize
        beside = max(math.prod(call.shape) - call.late_bytes, scaled)
        return call.rows * (call.in_features + 4) + call.grouped_bytes + beside

    def run(self, call: Scatter2Scatter) -> tuple[Tensor, Tensor]:
        from inductor_q.kernels import expert_fp8_triton as rows
        from inductor_q.kernels.expert_rows_triton import project_rows
        from inductor_q.kernels.scatter2scatter_grouped_mm import rows_out

        x = call.x.contiguous()
        with on(x.device):
            codes, of_rows = rows.cast_rows(call, x)
            y = _product(call, codes, of_rows)
            rank, scaled = project_rows(call, x, depth=128, stages=4)
            if scaled is not None:
                rows.add_adapter(call, y, scaled)
        return rows_out(call, y), rank


def _product(call: Scatter2Scatter, codes: Tensor, of_rows: Tensor) -> Tensor:
    """Multiply rows in e4m3 with the experts, which are gone after it; return [R, N]."""
    from inductor_q.kernels.dispatch import serve  # which lists this provider

    assert call.fmt is not None and call.row_scale is not None
    experts, n, k = call.shape
    scale = call.row_scale.contiguous()
    size = (k, experts * n) if call.transposed else (experts * n, k)
    weights = codes.new_empty(size)
    serve("requantize", Requantize(call.operands, call.fmt, scale, weights, call.transposed))
    if call.transposed:
        stacked = weights.view(k, experts, n).permute(1, 2, 0)
        of_columns = _ones(experts, k, scale.device)
    else:
        stacked, of_columns = weights.view(experts, n, k).transpose(1, 2), scale.view(experts, n)
    return torch._scaled_grouped_mm(
        codes,
        stacked,
        of_rows,
        of_columns,
        offs=call.offsets[1:],
        out_dtype=call.x.dtype,
        use_fast_accum=True,  # as `ops.eight_bits.scaled_product` has it
    )


@functools.lru_cache(maxsize=64)
def _ones(experts: int, columns: int, device: torch.device) -> Tensor:
    return kept(lambda: torch.ones((experts, columns), dtype=torch.float32, device=device))


KERNEL = Fp8()
