"""One tensor in k bits: quantize, dequantize, codebooks, E4M4 scales."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from inductor_q import ops
from inductor_q.exc import NotFinite, ScaleOutOfRange, WrongCodebook
from inductor_q.formats.kbit import kbit_format_name, normal_float
from inductor_q.formats.minifloat import E4M4
from inductor_q.kernels.quantize_kbit_reference import decode_e4m4, encode_e4m4
from inductor_q.ops.quantize_kbit import check_absmax, check_bits

#: (smallest, largest) magnitude that each kind of scale holds in full precision.
RANGES = {
    "e4m4": (E4M4.smallest_normal, E4M4.largest),
    "fp16": (torch.finfo(torch.float16).tiny, torch.finfo(torch.float16).max),
}


@dataclass(frozen=True, eq=False)
class KBitTensor:
    """Hold a quantized tensor: the operands of its format, and shape and dtype of the original.

    qweight: int32 bit planes; absmax: uint8 (E4M4) or float16, one per 32 elements; codebook:
    float32 [2**k]. `shape` and `dtype` are the original's.
    """

    qweight: Tensor
    absmax: Tensor
    codebook: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def k(self) -> int:
        return self.codebook.numel().bit_length() - 1

    @property
    def format(self) -> str:
        """The name in `inductor_q.FORMATS`."""
        return kbit_format_name(self.k, "e4m4" if self.absmax.dtype == torch.uint8 else "fp16")

    @property
    def operands(self) -> list[Tensor]:
        """The operands that `inductor_q.ops.dequantize` and `linear` take, in their order."""
        return [self.qweight, self.absmax, self.codebook]

    @property
    def nbytes(self) -> int:
        """The bytes of codes and scales; the codebook's 2**k floats are not counted."""
        return self.qweight.nbytes + self.absmax.nbytes

    @property
    def bits_per_element(self) -> float:
        """The size per element: K + 0.25 bits with E4M4 scales, K + 0.5 with fp16, and padding."""
        return 8 * self.nbytes / max(1, math.prod(self.shape))


def quantize(
    tensor: Tensor,
    k: int,
    codebook: Tensor | None = None,
    absmax: str = "e4m4",
    *,
    what: str = "tensor to quantize",
) -> KBitTensor:
    """Quantize `tensor` to `k` bits per element, in blocks of 32.

    Args:
        tensor: float32, bfloat16 or float16, of any shape and device.
        k: 2 to 5.
        codebook: float32 [2**k], ascending; None takes `normal_float_codebook(k)`.
        absmax: the scales: "e4m4" (8 bits, up to 31.0, 1.1 % rounding) or "fp16".
        what: what errors call the tensor.

    The arithmetic is that of `inductor_q.ops.quantize_kbit`, to the bit.

    Raises:
        UnsupportedBits, UnknownAbsmax, WrongCodebook, WrongDtype: the arguments.
        NotFinite: the tensor holds NaN or infinity.
        ScaleOutOfRange: its largest magnitude does not fit `absmax` scales.
    """
    check_bits(k)
    check_absmax(absmax)
    if codebook is None:
        codebook = normal_float_codebook(k, tensor.device)
    check_codebook(codebook, k)
    check_values(tensor, absmax, what)
    codebook = codebook.to(tensor.device)
    qweight, scales = ops.quantize_kbit(tensor.detach(), codebook, k, absmax)
    return KBitTensor(qweight, scales, codebook, tuple(tensor.shape), tensor.dtype)


def dequantize(quantized: KBitTensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the values in `dtype`, by default that of the original.

    They are computed in float32 and rounded once.

    Raises:
        CorruptQuantState, WrongDtype: the operands do not fit the shape, or each other.
    """
    q = quantized
    return ops.dequantize(q.operands, q.format, q.shape, dtype or q.dtype)


def normal_float_codebook(k: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the default codebook, float32 [2**k]: quantiles of the normal distribution.

    They are divided by the last one, so they reach from -1 to 1, and none of them is zero.

    Made once for each `k` and device: do not write into it.
    """
    check_bits(k)
    return _normal_float_codebook(k, torch.device(device))


@functools.cache
def _normal_float_codebook(k: int, device: torch.device) -> Tensor:
    return torch.tensor(normal_float(k), dtype=torch.float32, device=device)


def encode_absmax_e4m4(absmax: Tensor) -> Tensor:
    """Return the uint8 E4M4 codes nearest to `absmax`, magnitudes up to 31.0.

    Ties go to the even code.

    Raises:
        NotFinite: NaN or infinity.
        ScaleOutOfRange: a negative number, or one above 31.0.
    """
    values = absmax.detach().float()
    low, high = _extremes(values, "absmax")
    if low < 0 or high > E4M4.largest:
        raise _out_of_range("absmax", low if low < 0 else high, "e4m4")
    return encode_e4m4(values)


def decode_absmax_e4m4(codes: Tensor) -> Tensor:
    """Return the float32 scales that uint8 E4M4 `codes` stand for."""
    return decode_e4m4(codes)


def check_codebook(codebook: Tensor, k: int) -> None:
    """Raise unless `codebook` can be one of `k` bits. Reads its values: synchronizes."""
    problem = ""
    if codebook.dtype is not torch.float32:
        problem = f"its dtype is {codebook.dtype}"
    elif tuple(codebook.shape) != (2**k,):
        problem = f"its shape is {tuple(codebook.shape)}"
    elif not codebook.isfinite().all():
        problem = "a value is NaN or infinite"
    elif (codebook[1:] < codebook[:-1]).any():
        first = int((codebook[1:] < codebook[:-1]).nonzero()[0])
        problem = f"value {first + 1} is smaller than value {first}"
    if problem:
        raise WrongCodebook(k=k, problem=problem)


def check_values(tensor: Tensor, absmax: str, what: str) -> None:
    """Raise unless every block of `tensor` has a scale. Reads the values: synchronizes."""
    low, high = _extremes(tensor.detach(), what)
    largest = max(-low, high)
    smallest_scale, largest_scale = RANGES[absmax]
    if largest and not smallest_scale <= largest <= largest_scale:
        raise _out_of_range(what, largest, absmax)


def _extremes(tensor: Tensor, what: str) -> tuple[float, float]:
    if tensor.numel() == 0:
        return 0.0, 0.0
    low, high = (bound.item() for bound in torch.aminmax(tensor))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise NotFinite(what=what)
    return low, high


def _out_of_range(what: str, value: float, absmax: str) -> ScaleOutOfRange:
    low, high = RANGES[absmax]
    return ScaleOutOfRange(what=what, value=value, absmax=absmax, low=low, high=high)
