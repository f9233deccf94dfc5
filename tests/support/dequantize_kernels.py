"""Compare a dequantization kernel with the reference, on layouts and scales that are hard."""

from __future__ import annotations

import torch

from inductor_q.formats import FORMATS, QuantFormat
from inductor_q.kernels import dequantize_reference
from inductor_q.kernels.calls import Dequantize
from inductor_q.kernels.provider import DequantizeProvider
from tests.support.quantized import assert_same_bits, sample

#: (rows, cols, extra columns of the output's rows)
LAYOUTS = [(4, 128, 0), (4, 128, 64), (3, 96, 5), (5, 7, 0), (5, 7, 2), (6, 1, 3), (1, 1, 0)]

_DENORMAL = torch.tensor([1e-38, 3e-39, 1e-40, 1.4e-45, 1e-30, 9e-31, 1e-37, 0.0])
_EXTREME = torch.tensor([float("inf"), -float("inf"), float("nan"), 3e38, 65504.0, 1e5, -0.0, 1.0])
#: 1.0 * scale lies halfway between two bfloat16 (or float16) numbers, the even one below or above;
#: the last is a NaN that rounding would carry over into -0.0.
_TIES = torch.tensor(
    [
        0x3F808000,
        0x3F818000,
        0x3F801000,
        0x3F803000,
        0x00008000,
        0x00018000,
        0x33000000,
        0x7FFFFFFF,
    ],
    dtype=torch.int32,
).view(torch.float32)
SCALES = {"denormal": _DENORMAL, "extreme": _EXTREME, "ties": _TIES}


def check(
    kernel: DequantizeProvider,
    fmt: QuantFormat,
    layout: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    storage: torch.dtype = torch.uint8,
) -> None:
    """Compare `kernel` with the reference, into rows of their own length or of a wider matrix."""
    rows, cols, extra = layout
    operands, values = sample(fmt, (rows, cols), storage=storage)
    expected = torch.empty(rows, cols, dtype=dtype)
    dequantize_reference.KERNEL.run(Dequantize(operands, fmt, expected))
    assert_same_bits(expected, values.to(dtype))
    wide = torch.full((rows, cols + extra), 7.0, dtype=dtype, device=device)
    out = wide[:, :cols]
    moved = [t.to(device) for t in operands]
    assert kernel.refuses(Dequantize(moved, fmt, out)) == ""
    kernel.run(Dequantize(moved, fmt, out))
    assert_same_bits(out.cpu(), expected)
    assert (wide[:, cols:] == 7.0).all(), "wrote beside its columns"


def decoded_by(kernel: DequantizeProvider) -> list[str]:
    """Return the names of the formats that `kernel` knows."""
    return [fmt.name for fmt in FORMATS.values() if not kernel.unknown(fmt)]
