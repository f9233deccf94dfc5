"""A projection of experts with products in FP8, by torch's grouped GEMM: a peer of bench_moe.

Experts are decoded to e4m3 with a scale for each out-feature, tokens are cast with a scale each
before their rows are gathered, and `torch._scaled_grouped_mm` multiplies. An adapter keeps its
input in 16 bits: its product is added. It is what `qfuse.compute="fp8"` would make of
`scatter2scatter` if that were faster (docs/moe-measured.md has where it is, and where not).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config

from inductor_q import lowerings, ops
from inductor_q.kernels.calls import DENSE
from inductor_q.kernels.dispatch import preferring
from inductor_q.ops import eight_bits
from inductor_q.ops.routing import Routing

E4M3 = torch.float8_e4m3fn


def missing(device: torch.device) -> str:
    """Return why a device has no such product; empty where it has."""
    if device.type != "cuda":
        return "torch has no grouped GEMM in FP8 on a CPU"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "torch's grouped GEMM in FP8 needs compute capability 9.0"
    return ""


def forward(
    x: Tensor,
    operands: Sequence[Tensor],
    format: str,
    shape: Sequence[int],
    routing: Routing,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    scaling: float,
) -> Tensor:
    """Return the rows of all slots [R, N], in grouped order."""
    experts, n, k = shape
    token = routing.order // routing.top_k
    flat = (experts * n, k)
    with dynamo_config.patch(recompile_limit=64):  # a graph for each case of the benchmark
        rows, of_rows, weight, of_weight = _eight_bits()(x, token, operands, format, flat)
    offsets = routing.offsets[1:]
    y = torch._scaled_grouped_mm(
        rows,
        weight.view(experts, n, k).transpose(1, 2),
        of_rows,
        of_weight.view(experts, n),
        offs=offsets,
        out_dtype=x.dtype,
        use_fast_accum=True,
    )
    if lora_a is None or lora_b is None:
        return y
    rank = (experts, *lora_a.shape[1:])
    with preferring("scatter2scatter", "triton"):  # reads rows where they lie
        projected = ops.scatter2scatter(x, [lora_a], DENSE, rank, routing, grouped_out=True)
    part = torch._grouped_mm(projected, lora_b.transpose(1, 2), offs=offsets)
    return y.add_(part, alpha=scaling)


@functools.cache
def _eight_bits() -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Compile what stands in front of the product, so that its casts are few kernels."""
    lowerings.register()

    def both(
        x: Tensor, token: Tensor, operands: Sequence[Tensor], format: str, flat: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        codes, of_token = eight_bits.cast_rows(x, E4M3)
        amax = torch.ops.qfuse.row_amax(operands, format, flat)
        of_weight = eight_bits.to_scale(amax, E4M3)
        weight = torch.ops.qfuse.requantize(operands, of_weight, format, flat, E4M3, False)
        return codes[token], of_token[token, 0], weight, of_weight

    return torch.compile(both, dynamic=False)
