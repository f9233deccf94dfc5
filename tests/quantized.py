"""Real bitsandbytes weights for tests, and what bitsandbytes makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import bitsandbytes
import bitsandbytes.functional
import pytest
import torch
from torch import Tensor

from inductor_q.capture.bnb_state import bnb_operands

bnb: Any = bitsandbytes.functional  # as shipped, it is typed in parts

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUANT_TYPES = ("nf4", "fp4")

AT_LEAST_0_50 = tuple(map(int, bitsandbytes.__version__.split(".")[:2])) >= (0, 50)
needs_0_50 = pytest.mark.skipif(
    not AT_LEAST_0_50,
    reason="bitsandbytes < 0.50 on a CPU: no odd sizes, tables rounded before the product",
)


@dataclass(frozen=True)
class Quantized:
    """A weight before and after `quantize_4bit`."""

    original: Tensor
    packed: Tensor
    state: Any

    @property
    def operands(self) -> tuple[list[Tensor], str, list[int]]:
        return bnb_operands(self.packed, self.state)


def quantize(
    shape: Sequence[int],
    quant_type: str = "nf4",
    *,
    blocksize: int = 64,
    nested: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    storage: torch.dtype = torch.uint8,
    device: str = "cpu",
    seed: int = 0,
) -> Quantized:
    """A seeded normal weight of `shape`, quantized by bitsandbytes."""
    generator = torch.Generator().manual_seed(seed)
    original = (torch.randn(tuple(shape), generator=generator) * 0.02).to(device, dtype)
    packed, state = bnb.quantize_4bit(
        original,
        blocksize=blocksize,
        quant_type=quant_type,
        compress_statistics=nested,
        quant_storage=storage,
    )
    return Quantized(original, packed, state)


def by_table(packed: Tensor, state: Any, dtype: torch.dtype | None = None) -> Tensor:
    """The weight from bitsandbytes' published table and scales: blocks run through the rows.

    What its CUDA kernel and its generic implementation compute, at any row length.
    """
    absmax = state.absmax
    if state.nested:
        absmax = bnb.dequantize_blockwise(absmax, state.state2) + state.offset
    in_bytes = packed.reshape(-1).view(torch.uint8).int()
    codes = torch.stack([in_bytes >> 4, in_bytes & 15], -1).flatten()[: state.shape.numel()]
    table: Tensor = bnb.get_4bit_type(state.quant_type, device=packed.device)
    scale: Tensor = absmax.float().repeat_interleave(state.blocksize)[: codes.numel()]
    return (table[codes] * scale).reshape(state.shape).to(dtype or state.dtype)


def bits(x: Tensor) -> Tensor:
    """The bit patterns of `x` with one pattern for all NaNs: -0.0 differs from 0.0."""
    nan = torch.full((), float("nan"), dtype=x.dtype, device=x.device)
    return torch.where(x.isnan(), nan, x).view({2: torch.int16, 4: torch.int32}[x.element_size()])


def assert_same_as_native(actual: Tensor, expected: Tensor) -> None:
    """The bits of bitsandbytes' native kernels, which differ among themselves (by processor, CPU or
    CUDA) in the sign of the zero that fp4's code 8 is, and in nothing else."""
    assert_same_bits(actual + 0.0, expected + 0.0)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    differ = bits(actual.contiguous()) != bits(expected.contiguous())
    assert not differ.any(), (
        f"{int(differ.sum())} of {differ.numel()} values differ, the first at "
        f"{differ.nonzero()[0].tolist()}: {actual[differ][0]!r}, expected {expected[differ][0]!r}"
    )
