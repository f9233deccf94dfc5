"""Products in 16 bits on CPUs that have no instructions for them."""

from __future__ import annotations

import functools
import platform

import torch
from torch import Tensor


def multiplies_slowly(x: Tensor) -> bool:
    """Whether products of tensors like `x` take a loop of torch's own, because they are on a CPU,
    in 16 bits, and oneDNN takes no such products there."""
    return x.device.type == "cpu" and x.dtype in slow_dtypes()


@functools.cache
def slow_dtypes() -> tuple[torch.dtype, ...]:
    """Return the dtypes of 16 bits whose products oneDNN does not take on this CPU; none where
    nothing was measured, which is on all but x86."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return ()
    onednn = torch.ops.mkldnn
    served = {
        torch.bfloat16: onednn._is_mkldnn_bf16_supported,
        torch.float16: onednn._is_mkldnn_fp16_supported,
    }
    return tuple(dtype for dtype, is_served in served.items() if not is_served())
