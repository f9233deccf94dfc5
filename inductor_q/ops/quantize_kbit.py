"""`qfuse::quantize_kbit`: a tensor as k-bit codes and the scales of their blocks.

The steps below are the semantics, to the bit: what a faster kernel writes is compared with them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inductor_q.exc import UnknownAbsmax, UnsupportedBits, WrongDtype, WrongShape
from inductor_q.formats.kbit import KBIT_SCALES, KBITS
from inductor_q.kernels.calls import QuantizeKbit
from inductor_q.kernels.checks import DTYPES
from inductor_q.kernels.dispatch import serve
from inductor_q.kernels.quantize_kbit_reference import allocate
from inductor_q.ops.library import define, define_autograd


def quantize_kbit(x: Tensor, codebook: Tensor, k: int, absmax: str) -> tuple[Tensor, Tensor]:
    """Quantize `x`, flattened row by row, in blocks of 32 elements.

    1. `a` = the largest |x| of the block, in float32, encoded: "e4m4" as `encode_e4m4` does, "fp16"
       rounded to nearest even. `s` = what that decodes to, in float32.
    2. `v = x.float() / s`, one IEEE division; 0 where `s` is 0.
    3. `code` = how many of the midpoints `(codebook[i] + codebook[i + 1]) * 0.5`, in float32, are
       strictly below `v`: the nearest entry, the lower of two equally near.
    4. Bit j of `qweight[block * k + p]` is bit p of the block's j-th code; past the end of `x` the
       codes are 0.

    A block of zeros has scale 0 and the codes of the entry nearest to zero. Dividing by the scale
    as decoded, not by `a`, makes up for the rounding of the scale in every element but the largest.

    Args:
        x: float32, bfloat16 or float16, of any shape; finite, which is not checked.
        codebook: float32 [2**k], ascending, which is not checked; duplicates are allowed.
        k: 2 to 5.
        absmax: "e4m4" or "fp16". A block beyond its range (31 and 65504) is clipped, or infinite.

    Returns:
        qweight: int32 [ceil(numel / 32) * k].
        absmax: uint8 or float16 [ceil(numel / 32)].
        Together with `codebook` they are the operands of the format `kbit{k}_{absmax}`.

    Raises:
        UnsupportedBits, UnknownAbsmax, WrongShape, WrongDtype.
    """
    result: tuple[Tensor, Tensor] = torch.ops.qfuse.quantize_kbit(x, codebook, k, absmax)
    return result


def check_bits(k: int) -> None:
    if isinstance(k, bool) or k not in KBITS:
        raise UnsupportedBits(k=k, supported=KBITS)


def check_absmax(absmax: str) -> None:
    if absmax not in KBIT_SCALES:
        raise UnknownAbsmax(name=absmax, known=tuple(KBIT_SCALES))


def _check(x: Tensor, codebook: Tensor, k: int, absmax: str) -> None:
    check_bits(k)
    check_absmax(absmax)
    if x.dtype not in DTYPES:
        raise WrongDtype(what="tensor to quantize", expected=DTYPES, got=x.dtype)
    if codebook.dtype is not torch.float32:
        raise WrongDtype(what="codebook", expected=torch.float32, got=codebook.dtype)
    if tuple(codebook.shape) != (2**k,):
        raise WrongShape(what=f"codebook of k={k}", expected=(2**k,), got=tuple(codebook.shape))


def _quantize_kbit(x: Tensor, codebook: Tensor, k: int, absmax: str) -> tuple[Tensor, Tensor]:
    _check(x, codebook, k, absmax)
    call = QuantizeKbit(x, codebook, k, absmax)
    result: tuple[Tensor, Tensor] = serve("quantize_kbit", call)
    return result


def _fake(x: Tensor, codebook: Tensor, k: int, absmax: str) -> tuple[Tensor, Tensor]:
    _check(x, codebook, k, absmax)
    return allocate(x, k, absmax)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(*output)


def _no_gradient(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
    return None, None, None, None


def define_quantize_kbit() -> None:
    define(
        "quantize_kbit(Tensor x, Tensor codebook, int k, str absmax) -> (Tensor, Tensor)",
        _quantize_kbit,
        _fake,
    )
    define_autograd("quantize_kbit", _no_gradient, _setup_context)
