"""What the expert GEMMs that look nibbles up ask of a format, and the values they look up."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from inductor_q.formats import QuantFormat

HIGH_FIRST = (4, 0)


def refuses(fmt: QuantFormat) -> str:
    """Empty for 4-bit codes in bytes, high nibble first, with a fixed codebook; else the reason."""
    if fmt.nibbles != HIGH_FIRST:
        return f"{fmt.name} is not packed as nibbles, high one first"
    if fmt.lut16 is None:
        return f"{fmt.name} has no fixed codebook of 16 values"
    return ""


@functools.cache
def fit(values: tuple[float, ...], dtype: torch.dtype) -> tuple[Tensor, float]:
    """Values [16] in `dtype`, 16 bits, and a stretch in [1, 2) with `values * stretch` closest.

    A codebook rounded to bfloat16 as it is would add 1.4e-3 to the error of every nf4 weight, whose
    own rounding is 1.6e-3; stretched by 1.437 first it adds 0.8e-3, and nothing to fp4.
    """
    exact = torch.tensor(values, dtype=torch.float64)
    stretches = torch.linspace(1, 2, 1 << 16, dtype=torch.float64)[:-1, None]
    rounded = (exact * stretches).to(torch.float32).to(dtype)
    wrong = ((rounded.double() / stretches - exact) ** 2).sum(1)
    best = int(wrong.argmin())
    return rounded[best], float(stretches[best])
