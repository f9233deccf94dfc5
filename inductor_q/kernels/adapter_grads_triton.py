"""Both gradients of an adapter's second product on a GPU, in one read of the layer's gradient.

A program has a stripe of columns and some hundreds of rows. It reads each tile of them once. It
multiplies the tile with B, which gives a part of the projection's gradient, and with the
projection, which it adds to its part of B's gradient. A second launch adds all parts up in a fixed
order. Two products of cuBLAS read the gradient of the layer twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from inductor_q.kernels.calls import AdapterGrads
from inductor_q.kernels.dequantize_triton import INT32_LIMIT
from inductor_q.kernels.gpu import MOST_TILES, few_ranks, lanes
from inductor_q.kernels.provider import TritonProvider
from inductor_q.kernels.triton_launch import Repeated

#: The most ranks that a program takes. The parts that it writes grow with them.
MOST = 32
#: A gradient of fewer elements than were measured is left to cuBLAS.
FEW = 1 << 19
PROGRAMS = 128  # that a launch has at least, about one for each multiprocessor of a large GPU
PARTS = (128, 1024)  # the fewest and the most rows of a program
BLOCK = 512  # numbers that a program of the second launch adds up


@dataclass(frozen=True)
class Config:
    """The tile that a program reads at a time, and how many of them are on their way."""

    rows: int
    columns: int
    warps: int
    stages: int


#: Measured on an H100 and an H200, with 1024, 4096 and 12288 columns.
WIDE = Config(rows=64, columns=256, warps=8, stages=4)
NARROW = Config(rows=64, columns=128, warps=4, stages=4)
NARROW_BELOW = 4096  # columns
WIDE_SHARED = 163 << 10  # bytes of shared memory, an A100's; NARROW is for GPUs that have less, too


class Triton(TritonProvider[AdapterGrads]):
    def refuses(self, call: AdapterGrads) -> str:
        grad, p, b = call.grad, call.p, call.b
        if refused := few_ranks((grad, p, b), p.shape[1], MOST):
            return refused
        if grad.numel() < FEW:
            return f"a gradient of fewer than {FEW} elements"
        if grad.is_cuda and torch.cuda.get_device_capability(grad.device) < (8, 0):
            return "the device is older than compute capability 8.0"
        if any(t.stride(1) != 1 for t in (grad, p, b, call.of_p, call.of_b)):
            return "the numbers of a row lie apart"
        rows, columns = grad.shape
        if max(rows * _spread(call), columns * lanes(p.shape[1])) >= INT32_LIMIT:
            return "offsets into the parts of a program do not fit 32 bits"
        if rows > MOST_TILES * PARTS[1]:
            return f"a launch has at most {MOST_TILES} parts of {PARTS[1]} rows"
        return ""

    def plan(self, call: AdapterGrads) -> Callable[[AdapterGrads], None]:
        narrow = call.grad.shape[1] < NARROW_BELOW or _shared(call.device) < WIDE_SHARED
        return plan(call, NARROW if narrow else WIDE)


def _spread(call: AdapterGrads) -> int:
    """Return how many numbers of a row of `of_p` the second launch counts, a power of two."""
    return max(lanes(call.p.shape[1]), 1 << (call.of_p.shape[1] - 1).bit_length())


def _shared(device: torch.device) -> int:
    """Return how many bytes of shared memory a program may have; the interpreter has any."""
    if device.type != "cuda":
        return WIDE_SHARED
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def plan(call: AdapterGrads, config: Config) -> Callable[[AdapterGrads], None]:
    """Prepare both launches for calls that are like this one."""
    import triton

    from inductor_q.kernels import adapter_grads_kernels_triton as kernels

    (rows, columns), rank = call.grad.shape, call.p.shape[1]
    stripes = triton.cdiv(columns, config.columns)
    least, most = PARTS
    part = min(max(triton.next_power_of_2(rows * stripes // PROGRAMS), least), most)
    parts = triton.cdiv(rows, part)
    width = lanes(rank)
    ranks = {"RANK": rank, "LANES": width}
    multiply = Repeated(
        kernels.multiply,
        (stripes, parts, 1),
        (rows, columns, call.grad.stride(0), call.p.stride(0), call.b.stride(0)),
        {
            **ranks,
            "ROWS": config.rows,
            "COLUMNS": config.columns,
            "STEPS": part // config.rows,
            "STAGES": config.stages,
        },
        num_warps=config.warps,
    )
    out_width = call.of_p.shape[1]
    spread = _spread(call)
    of_p, of_b = triton.cdiv(rows * spread, BLOCK), triton.cdiv(columns * width, BLOCK)
    add = Repeated(
        kernels.finish,
        (of_p + of_b, 1, 1),
        (rows, columns, stripes, parts, of_p, call.of_p.stride(0), call.of_b.stride(0)),
        {
            **ranks,
            "WIDTH": out_width,
            "SPREAD": spread,
            "FACTOR_P": call.factor_p,
            "FACTOR_B": call.factor_b,
            "BLOCK": BLOCK,
        },
        num_warps=4,
    )

    def serve(call: AdapterGrads) -> None:
        parts_p = call.grad.new_empty((stripes, rows, width), dtype=torch.float32)
        parts_b = call.grad.new_empty((parts, columns, width), dtype=torch.float32)
        multiply((call.grad, call.p, call.b, parts_p, parts_b))
        add((parts_p, parts_b, call.of_p, call.of_b))

    return serve


KERNEL = Triton()
