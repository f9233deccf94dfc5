"""`qfuse::quantize_kbit` in plain torch: the semantics, to the bit.

Tests compare what faster kernels write with this.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_q.decode.eager import Eager
from inductor_q.formats.kbit import BLOCK
from inductor_q.formats.minifloat import E4M4
from inductor_q.kernels.calls import QuantizeKbit
from inductor_q.kernels.provider import REFERENCE, Provider

BLOCKS_AT_ONCE = 1 << 17  # 4 million elements: a float32 copy of them is 16 MiB

_ONE = 1 << E4M4.mantissa_bits  # the code of the smallest normal number
_REBIAS = (127 - E4M4.bias) << E4M4.mantissa_bits
_SHIFT = 23 - E4M4.mantissa_bits
_UNIT = 2.0 ** (1 - E4M4.bias - E4M4.mantissa_bits)  # the smallest subnormal number


def encode_e4m4(absmax: Tensor) -> Tensor:
    """Round float32 numbers `absmax` >= 0 to the nearest uint8 E4M4 codes, ties to even; 255 above.

    They are not rounded up: over normal weights and a normal-float codebook, that loses 0.15 to
    0.2 dB at every k, and to nearest less than 0.06 dB (tests/kbit/test_kbit.py).
    """
    bits = absmax.contiguous().view(torch.int32)
    half_less_one, odd = (1 << (_SHIFT - 1)) - 1, (bits >> _SHIFT) & 1
    normal = ((bits + half_less_one + odd) >> _SHIFT) - _REBIAS
    subnormal = (absmax / _UNIT).clamp(max=_ONE).round().int()  # 16, the first normal, follows 15
    return torch.where(absmax < _ONE * _UNIT, subnormal, normal).clamp(max=255).to(torch.uint8)


def decode_e4m4(code: Tensor) -> Tensor:
    """Return the float32 numbers that the uint8 E4M4 codes stand for."""
    return E4M4.decode(Eager({}), code)


def midpoints(codebook: Tensor) -> Tensor:
    """Return where the nearest entry of an ascending codebook changes: [2**k - 1]."""
    return (codebook[:-1] + codebook[1:]) * 0.5


def pack(codes: Tensor, k: int) -> Tensor:
    """Pack integer codes [blocks, 32] into bit planes, int32 [blocks * k]."""
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


class Reference(Provider[QuantizeKbit]):
    name = REFERENCE

    def run(self, call: QuantizeKbit) -> tuple[Tensor, Tensor]:
        return reference(call.x, call.codebook, call.k, call.absmax)


KERNEL = Reference()
