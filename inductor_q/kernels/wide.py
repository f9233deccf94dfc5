"""Products in 16 bits on CPUs that have no instructions for them."""

from __future__ import annotations

import functools
import platform

import torch
from torch import Tensor


def multiplies_slowly(x: Tensor) -> bool:
    """Whether products of tensors like `x` take a loop of torch's own, because they are on a CPU,
    in 16 bits, and oneDNN takes no such products there (see `slow_dtypes`)."""
    return x.device.type == "cpu" and x.dtype in slow_dtypes()


@functools.cache
def slow_dtypes() -> tuple[torch.dtype, ...]:
    """Return the dtypes of 16 bits in which this CPU multiplies slowly: both where oneDNN takes no
    product in bfloat16. Other architectures than x86 were not measured, nor was float16 where
    bfloat16 is fast."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return ()
    served = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return () if served else (torch.bfloat16, torch.float16)
