"""Quantize to bit planes on a GPU with one Triton launch: the twin of csrc/kbit.cu.

A program takes some blocks of 32 elements as rows of a tile: the absmax is a maximum over a row, a
plane a sum of shifted bits over it. A code is found by bisection of the thresholds.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inductor_q.formats.kbit import BLOCK
from inductor_q.formats.minifloat import E4M4
from inductor_q.kernels.calls import QuantizeKbit
from inductor_q.kernels.dequantize_triton import INT32_LIMIT, compile_source
from inductor_q.kernels.gpu import on
from inductor_q.kernels.provider import TritonProvider
from inductor_q.kernels.quantize_kbit_reference import allocate, midpoints


@dataclass(frozen=True)
class Config:
    """Blocks of 32 elements per program, and warps per program."""

    blocks: int = 32
    num_warps: int = 4


DEFAULT = Config()

_KERNEL = """
@triton.jit
def e4m4(x):
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + {half_less_one} + ((bits >> {shift}) & 1)) >> {shift}) - {rebias}
    # Adding 2**23 rounds to an integer, to nearest even.
    subnormal = (x * {per_unit} + 8388608.0).to(tl.int32, bitcast=True) & 0xFF
    return tl.minimum(tl.where(x < {smallest_normal}, subnormal, normal), 255)


@triton.jit
def e4m4_value(code):
    normal = ((code + {rebias}) << {shift}).to(tl.float32, bitcast=True)
    return tl.where(code < {one}, code.to(tl.float32) * {unit}, normal)


@triton.jit
def quantize(x, thresholds, qweight, absmax, numel, blocks,
             K: tl.constexpr, E4M4: tl.constexpr, BLOCKS: tl.constexpr, WIDE: tl.constexpr):
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    block = program * BLOCKS + tl.arange(0, BLOCKS)
    lane = tl.arange(0, 32)[None, :]
    i = block[:, None] * 32 + lane
    inside = i < numel
    value = tl.load(x + i, mask=inside, other=0).to(tl.float32)
    largest = tl.max(tl.abs(value), 1)
    if E4M4:
        code = e4m4(largest)
        tl.store(absmax + block, code.to(tl.uint8), mask=block < blocks)
        scale = e4m4_value(code)
    else:
        half = largest.to(tl.float16)
        tl.store(absmax + block, half, mask=block < blocks)
        scale = half.to(tl.float32)
    # Divide by one where the scale is zero: what comes out is not used.
    safe = tl.where(scale == 0, 1.0, scale)
    ratio = tl.div_rn(value, tl.broadcast_to(safe[:, None], [BLOCKS, 32]))
    ratio = tl.where(scale[:, None] == 0, 0.0, ratio)
    below = tl.zeros([BLOCKS, 32], tl.int32)  # thresholds that are
    for step in tl.static_range(K):
        threshold = tl.load(thresholds + below + ((1 << (K - 1 - step)) - 1))
        below += tl.where(ratio > threshold, 1 << (K - 1 - step), 0)
    below = tl.where(inside, below, 0)
    for p in tl.static_range(K):
        plane = tl.sum(((below >> p) & 1) << lane, 1)
        tl.store(qweight + block * K + p, plane, mask=block < blocks)
"""


class Triton(TritonProvider[QuantizeKbit]):
    def run(self, call: QuantizeKbit, config: Config = DEFAULT) -> tuple[Tensor, Tensor]:
        x = call.x.contiguous()
        qweight, scales = allocate(x, call.k, call.absmax)
        blocks = scales.numel()
        if blocks:
            with on(x.device):
                _kernel()[(-(-blocks // config.blocks),)](
                    x,
                    midpoints(call.codebook),
                    qweight,
                    scales,
                    x.numel(),
                    blocks,
                    K=call.k,
                    E4M4=scales.dtype == torch.uint8,
                    BLOCKS=config.blocks,
                    WIDE=x.numel() + config.blocks * BLOCK >= INT32_LIMIT,
                    num_warps=config.num_warps,
                    enable_fp_fusion=False,
                )
        return qweight, scales


@functools.cache
def _kernel() -> Any:
    one, shift = 1 << E4M4.mantissa_bits, 23 - E4M4.mantissa_bits
    unit = 2.0 ** (1 - E4M4.bias - E4M4.mantissa_bits)  # the smallest subnormal number
    source = _KERNEL.format(
        half_less_one=(1 << (shift - 1)) - 1,
        shift=shift,
        rebias=(127 - E4M4.bias) << E4M4.mantissa_bits,
        per_unit=1 / unit,
        unit=unit,
        one=one,
        smallest_normal=one * unit,
    )
    return compile_source("<qfuse quantize_kbit>", source, "quantize")


KERNEL = Triton()
