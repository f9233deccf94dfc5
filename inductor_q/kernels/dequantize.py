"""Who serves a call of dequantize: the first kernel of the device's list that supports it.

What a kernel has prepared for a call is kept and launched again for all calls that are like it, so
that a launch costs the host little.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from inductor_q.formats import QuantFormat
from inductor_q.kernels import (
    dequantize_cpp,
    dequantize_cuda,
    dequantize_reference,
    dequantize_triton,
)
from inductor_q.kernels.kernel import DequantizeKernel, Launch

log = logging.getLogger("inductor_q")

DEQUANTIZE: dict[str, tuple[DequantizeKernel, ...]] = {
    "cpu": (dequantize_cpp.KERNEL, dequantize_reference.KERNEL),
    "cuda": (dequantize_cuda.KERNEL, dequantize_triton.KERNEL, dequantize_reference.KERNEL),
}

#: Kinds of calls that are remembered: many models' weights. With more all are forgotten, and come
#: back.
KEPT = 4096


def candidates(device_type: str, wanted: str = "auto") -> list[DequantizeKernel]:
    """The kernels in the order in which they are asked, `wanted` first."""
    kernels = DEQUANTIZE.get(device_type, DEQUANTIZE["cpu"][-1:])
    return sorted(kernels, key=lambda kernel: kernel.name != wanted)


def write(
    operands: Sequence[Tensor], fmt: QuantFormat, out: Tensor, provider: str = "auto"
) -> None:
    """Write the values into the matrix `out` with the first kernel that supports the call.

    A kernel named by `provider` is asked before the others; where the device has none of that name,
    a warning says so once. Kernels are asked at the first call of a kind; what the one that serves
    it has prepared is launched again for those that `DequantizeKernel` counts as like it.
    """
    key = (
        *(fmt, provider, out.device, out.dtype, out.shape, out.stride(), out.data_ptr() % 16),
        *[(t.dtype, t.is_contiguous(), t.data_ptr() % 16) for t in operands],
    )
    launch = _launches.get(key)
    if launch is None:
        if len(_launches) >= KEPT:
            _launches.clear()
        launch = _launches[key] = _prepare(operands, fmt, out, provider)
    launch(operands, out)


_launches: dict[tuple[Any, ...], Launch] = {}


def _prepare(operands: Sequence[Tensor], fmt: QuantFormat, out: Tensor, provider: str) -> Launch:
    if out.numel() == 0:
        return _nothing
    kernels = candidates(out.device.type, provider)
    if provider != "auto" and kernels[0].name != provider:
        tell_once(provider, f"there is none of that name for {out.device.type} tensors")
    for kernel in kernels:
        reason = kernel.supports(operands, fmt, out)
        if not reason:
            return kernel.prepare(operands, fmt, out)
        if not kernel.decodes(fmt):  # a kernel for other formats is no news
            tell_once(kernel.name, reason)
    raise AssertionError("the reference kernel serves every call")


def _nothing(operands: Sequence[Tensor], out: Tensor) -> None:
    """Of no elements."""


_told: set[tuple[str, str]] = set()


def tell_once(kernel: str, reason: str) -> None:
    """Warn that a kernel was passed over, once for each reason."""
    if (kernel, reason) not in _told:
        _told.add((kernel, reason))
        log.warning(
            "dequantize: kernel %r not used: %s; another one serves the call", kernel, reason
        )
