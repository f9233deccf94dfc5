"""`qfuse::quantize_kbit`: a tensor as k-bit codes and the scales of their blocks.

The functions here are the semantics, to the bit: what a faster kernel writes is compared with them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inductor_q.exc import UnknownAbsmax, UnsupportedBits, WrongDtype, WrongShape
from inductor_q.formats.kbit import BLOCK, E4M4, KBIT_SCALES, KBITS
from inductor_q.ops.library import define, define_autograd

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCKS_AT_ONCE = 1 << 17  # 4 million elements: a float32 copy of them is 16 MiB

_ONE = 1 << E4M4.mantissa_bits  # the code of the smallest normal number
_REBIAS = (127 - E4M4.bias) << E4M4.mantissa_bits
_SHIFT = 23 - E4M4.mantissa_bits
_UNIT = 2.0 ** (1 - E4M4.bias - E4M4.mantissa_bits)  # the smallest subnormal number


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
        x: float32, bfloat16 or float16, of any shape; finite, which is not looked at here.
        codebook: float32 [2**k], ascending, which is not looked at here; duplicates are allowed.
        k: 2 to 5.
        absmax: "e4m4" or "fp16". A block beyond its range (31 and 65504) is clipped, or infinite.

    Returns:
        qweight: int32 [ceil(numel / 32) * k].
        absmax: uint8 or float16 [ceil(numel / 32)].
        Together with `codebook` the operands of the format `kbit{k}_{absmax}`.

    Raises:
        UnsupportedBits, UnknownAbsmax, WrongShape, WrongDtype.
    """
    result: tuple[Tensor, Tensor] = torch.ops.qfuse.quantize_kbit(x, codebook, k, absmax)
    return result


def encode_e4m4(absmax: Tensor) -> Tensor:
    """The uint8 E4M4 codes nearest to the float32 numbers `absmax` >= 0, ties to even; 255 above.

    Nearest, not up: over normal weights and a normal-float codebook, rounding up loses 0.15 to
    0.2 dB at every k, to nearest less than 0.06 dB (tests/kbit/test_kbit.py).
    """
    bits = absmax.contiguous().view(torch.int32)
    half_less_one, odd = (1 << (_SHIFT - 1)) - 1, (bits >> _SHIFT) & 1
    normal = ((bits + half_less_one + odd) >> _SHIFT) - _REBIAS
    subnormal = (absmax / _UNIT).clamp(max=_ONE).round().int()  # 16, the first normal, follows 15
    return torch.where(absmax < _ONE * _UNIT, subnormal, normal).clamp(max=255).to(torch.uint8)


def decode_e4m4(code: Tensor) -> Tensor:
    """The float32 numbers that the uint8 E4M4 codes stand for."""
    from inductor_q.decode.eager import Eager

    value: Tensor = Eager({}).minifloat(code, E4M4.mantissa_bits, E4M4.bias)
    return value


def midpoints(codebook: Tensor) -> Tensor:
    """[2**k - 1]: where the nearest entry of an ascending codebook changes."""
    return (codebook[:-1] + codebook[1:]) * 0.5


def pack(codes: Tensor, k: int) -> Tensor:
    """int32 [blocks * k] bit planes of integer codes [blocks, 32]."""
    codes = codes.to(torch.uint8)
    planes = torch.stack([(codes >> p) & 1 for p in range(k)], 1)
    lanes = planes.view(-1, BLOCK // 8, 8)
    in_bytes = lanes[..., 0]
    for j in range(1, 8):
        in_bytes = in_bytes | (lanes[..., j] << j)
    return in_bytes.view(torch.int32).reshape(-1)  # bytes lie in words the least first


def reference(x: Tensor, codebook: Tensor, k: int, absmax: str) -> tuple[Tensor, Tensor]:
    flat, mids = x.reshape(-1), midpoints(codebook)
    words, scales = allocate(flat, k, absmax)
    for start in range(0, scales.numel(), BLOCKS_AT_ONCE):
        part = flat[start * BLOCK : (start + BLOCKS_AT_ONCE) * BLOCK].float()
        missing = -part.numel() % BLOCK
        blocks = torch.nn.functional.pad(part, (0, missing)).reshape(-1, BLOCK)
        largest = blocks.abs().amax(1)
        if absmax == "e4m4":
            encoded = encode_e4m4(largest)
            scale = decode_e4m4(encoded)
        else:
            encoded = largest.to(torch.float16)
            scale = encoded.float()
        value = torch.where(scale[:, None] == 0, 0.0, blocks / scale[:, None])
        codes = torch.zeros_like(value, dtype=torch.uint8)
        for mid in mids:
            codes += value > mid
        if missing:
            codes[-1, -missing:] = 0
        end = start + blocks.shape[0]
        scales[start:end] = encoded
        words[start * k : end * k] = pack(codes, k)
    return words, scales


def allocate(x: Tensor, k: int, absmax: str) -> tuple[Tensor, Tensor]:
    blocks = (x.numel() + BLOCK - 1) // BLOCK
    dtype = torch.uint8 if absmax == "e4m4" else torch.float16
    return x.new_empty(blocks * k, dtype=torch.int32), x.new_empty(blocks, dtype=dtype)


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
    from inductor_q.kernels import QUANTIZE_KBIT  # kernels sit above ops

    _check(x, codebook, k, absmax)
    for kernel in QUANTIZE_KBIT.get(x.device.type, ()):
        if not kernel.supports(x, codebook, k, absmax):
            return kernel.launch(x, codebook, k, absmax)
    return reference(x, codebook, k, absmax)


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
