"""Helpers that the GPU kernels share: for the outputs they write and the device they launch on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from inductor_q.kernels.checks import DTYPES

T = TypeVar("T")


def unfit(out: Tensor) -> str:
    """Return why `out` is no matrix that kernels write into; empty where it is one."""
    if out.dtype not in DTYPES:
        return f"output dtype {out.dtype} is not one of float32, bfloat16, float16"
    if out.dim() != 2 or (out.shape[1] > 1 and out.stride(1) != 1):
        return "the output is not a matrix with unit column stride"
    return ""


def on(device: torch.device) -> Any:
    """Enter the device's context where it is not the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def kept(make: Callable[[], T]) -> T:
    """Make what stays for the life of the process, in a thread of its own.

    Inductor warms CUDA graphs up in memory that all allocations of its thread come from, and in
    which nothing may stay. Nor do modes of this thread, as that of fake tensors, hold there.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
