"""Round matrices to eight bits, e4m3 or int8, with a scale for each row: torch's own operators."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

#: The dtype of each kind of product in eight bits, and its largest number.
DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
#: A row whose numbers are all smaller is cast as if its largest were this one: it may be zero.
LEAST = 2.0**-100


def to_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale under which numbers up to `amax` fit the dtype."""
    return amax.clamp_min(LEAST) * (1.0 / LARGEST[dtype])


def to_eight_bits(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 numbers that fit to e4m3 or int8, to the nearest."""
    return (scaled if dtype.is_floating_point else scaled.round()).to(dtype)


def cast_rows(x: Tensor, dtype: torch.dtype, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cast `x * factor` [M, K] to eight bits, with the scale of each row [M, 1] in float32."""
    return cast_together([x], dtype, factor)


def cast_together(
    parts: Sequence[Tensor], dtype: torch.dtype, factor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cast parts of a matrix, which lie side by side in it, as `cast_rows` does the whole: each by
    itself but for the scale, so that it is done where the part is computed."""
    wide = [x.to(torch.float32) for x in parts]
    if factor is not None:
        factors = factor.split([x.shape[-1] for x in parts], -1)
        wide = [x * of_part for x, of_part in zip(wide, factors, strict=True)]
    largest = [x.abs().amax(-1, keepdim=True) for x in wide]
    scale = to_scale(functools.reduce(torch.maximum, largest), dtype)
    codes = [to_eight_bits(x * scale.reciprocal(), dtype) for x in wide]
    return codes[0] if len(codes) == 1 else torch.cat(codes, -1), scale


def scale_of_rows(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale of each row [N] of a weight [N, K] that is not packed."""
    return to_scale(weight.to(torch.float32).abs().amax(-1), dtype)


def cast_weight(weight: Tensor, scale: Tensor, dtype: torch.dtype, *, transposed: bool) -> Tensor:
    """Cast a weight [N, K] that is not packed, by its scales; return [K, N] where `transposed`."""
    codes = to_eight_bits(weight.to(torch.float32) * scale.reciprocal().unsqueeze(1), dtype)
    return codes.t().contiguous() if transposed else codes
