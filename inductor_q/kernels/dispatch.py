"""Who serves a checked call: the first kernel of the device's list that supports it."""

from __future__ import annotations

import functools
import logging

from torch import Tensor

from inductor_q.kernels import (
    GROUPED_GRAM,
    QUANTIZE_KBIT,
    TILE_MAP,
    quantize_kbit_reference,
    scatter2scatter_kernels,
    tile_map,
)
from inductor_q.kernels.calls import GroupedGram, Scatter2Scatter

log = logging.getLogger("inductor_q")


def run_scatter2scatter(call: Scatter2Scatter, provider: str) -> tuple[Tensor, Tensor]:
    """A checked call by the first kernel that serves it."""
    if call.rows == 0:
        return empty(call)
    device_type = call.x.device.type
    kernels = scatter2scatter_kernels(device_type, provider, call)
    if provider not in ("auto", kernels[0].name):
        _tell_once(provider, f"there is none of that name for {device_type} tensors")
    for kernel in kernels:
        reason = kernel.supports(call)
        if not reason:
            return kernel.launch(call)
        if kernel.name == provider or not kernel.decodes(call.fmt):  # one for others is no news
            _tell_once(kernel.name, reason)
    raise AssertionError("the reference kernel serves every call")


@functools.cache
def _tell_once(kernel: str, reason: str) -> None:
    log.warning("scatter2scatter: kernel %r not used: %s", kernel, reason)


def empty(call: Scatter2Scatter) -> tuple[Tensor, Tensor]:
    rows = call.rows if call.grouped_out else call.tokens
    return call.x.new_empty((rows, call.out_features)), call.x.new_empty((call.rows, call.rank))


def run_grouped_gram(call: GroupedGram) -> Tensor:
    """A checked call by the first kernel that serves it."""
    if call.rows == 0:
        return call.left.new_zeros(call.shape, dtype=call.dtype)
    table = GROUPED_GRAM.get(call.left.device.type, GROUPED_GRAM["cpu"])
    return next(kernel for kernel in table if not kernel.supports(call)).launch(call)


def run_tile_map(offsets: Tensor, rows: int) -> Tensor:
    """By the first kernel of the device; by `tile_map.reference` where there is none."""
    for kernel in TILE_MAP.get(offsets.device.type, ()):
        if not kernel.available():
            return kernel.launch(offsets, rows)
    return tile_map.reference(offsets, rows)


def run_quantize_kbit(x: Tensor, codebook: Tensor, k: int, absmax: str) -> tuple[Tensor, Tensor]:
    """A checked call by the first kernel that serves it, else by the reference."""
    for kernel in QUANTIZE_KBIT.get(x.device.type, ()):
        if not kernel.supports(x, codebook, k, absmax):
            return kernel.launch(x, codebook, k, absmax)
    return quantize_kbit_reference.reference(x, codebook, k, absmax)
