"""Formats whose nibbles kernels of products look up, and the values that they look up."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from inductor_q.formats import QuantFormat

HIGH_FIRST = (4, 0)


def refuses(fmt: QuantFormat) -> str:
    """Return why a format is not nibbles of a fixed codebook; empty if it is."""
    if fmt.nibbles is None:
        return f"{fmt.name} is not packed as nibbles"
    if fmt.lut16 is None:
        return f"{fmt.name} has no fixed codebook of 16 values"
    return ""


@functools.cache
def fit(values: tuple[float, ...], dtype: torch.dtype) -> tuple[Tensor, float]:
    """Round 16 values, stretched by the best factor in [1, 2), to a 16-bit `dtype`; return both.

    A codebook rounded to bfloat16 as it is would add 1.4e-3 to the error of every nf4 weight, whose
    own rounding is 1.6e-3; stretched by 1.437 first it adds 0.8e-3, and nothing to fp4.
    """
    cpu = torch.device("cpu")  # a default device may be the GPU's, whose graph capture owns memory
    exact = torch.tensor(values, dtype=torch.float64, device=cpu)
    stretches = torch.linspace(1, 2, 1 << 16, dtype=torch.float64, device=cpu)[:-1, None]
    rounded = (exact * stretches).to(torch.float32).to(dtype)
    wrong = ((rounded.double() / stretches - exact) ** 2).sum(1)
    best = int(wrong.argmin())
    return rounded[best].clone(), float(stretches[best])
