"""Autocast of a CPU with what autocast of CUDA casts beside: a CUDA graph without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.library import _scoped_library

aten = torch.ops.aten
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


@contextlib.contextmanager
def cuda_autocast() -> Iterator[None]:
    """Enter autocast to bfloat16, where sums, powers and roots are float32, as on CUDA.

    (`at::autocast` has lists of ops for each device; models of transformers call these of them.)
    """

    def in_float32(op: Any) -> Callable[..., Tensor]:
        def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            with torch._C._ExcludeDispatchKeyGuard(_KEYS):
                result: Tensor = op(x.float() if is_eligible(x) else x, *args, **kwargs)
                return result

        return run

    def to_float32(op: Any) -> Callable[..., Tensor]:
        def run(x: Tensor, *args: Any, dtype: torch.dtype | None = None) -> Tensor:
            with torch._C._ExcludeDispatchKeyGuard(_KEYS):
                wide = torch.float32 if is_eligible(x) else None
                result: Tensor = op(x, *args, dtype=dtype or wide)
                return result

        return run

    with _scoped_library("aten", "IMPL") as library:
        library.impl("sum", to_float32(aten.sum.default), "AutocastCPU")
        library.impl("sum.dim_IntList", to_float32(aten.sum.dim_IntList), "AutocastCPU")
        library.impl("pow.Tensor_Scalar", in_float32(aten.pow.Tensor_Scalar), "AutocastCPU")
        library.impl("rsqrt", in_float32(aten.rsqrt.default), "AutocastCPU")
        with torch.autocast("cpu", torch.bfloat16):
            yield


def is_eligible(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype is not torch.float64
