"""Helpers that the GPU kernels share: for the outputs they write and the device they launch on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
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


#: The fewest numbers that tensor cores add up, or columns that they multiply, at a time.
LEAST_LANES = 16
MOST_TILES = (1 << 16) - 1  # along the second dimension of a grid in CUDA
HALVES = (torch.bfloat16, torch.float16)


def few_ranks(matrices: Sequence[Tensor], rank: int, most: int) -> str:
    """Return why tensor cores do not multiply these matrices, an adapter's among them, in programs
    that hold all ranks; empty where they do."""
    dtypes = {matrix.dtype for matrix in matrices}
    if len(dtypes) > 1 or dtypes.isdisjoint(HALVES):
        return "all matrices must be in bfloat16, or all in float16"
    return too_many_ranks(rank, most)


def too_many_ranks(rank: int, most: int) -> str:
    """Return that a program does not hold so many ranks; empty where it does."""
    return f"{rank} ranks are more than the {most} that the kernel takes" if rank > most else ""


def lanes(rank: int) -> int:
    """Return how many ranks a program computes with: a power of two, for tensor cores."""
    return max(LEAST_LANES, 1 << (rank - 1).bit_length())


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
