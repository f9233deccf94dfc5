"""Quantize a weight to MX formats, NVFP4 and FP8, by rounding each number to the nearest.

How a scale is chosen is no part of a format. Here it is:

- MXFP4, MXFP8: the power of two that the OCP Microscaling specification (version 1.0, section 6.3)
  names, `2^(floor(log2(amax)) - floor(log2(largest)))` with `largest` of the format's numbers.
  Values above it become the largest number. torchao calls that `ScaleCalculationMode.FLOOR`.
  Blocks so small that their scale is 2^-127 or would be below have half their values, as there.
- NVFP4: `amax / (448 * 6)` of the weight, or of each row, and for a block `amax / 6` over it,
  rounded to E4M3 and no subnormal number. Bitwise torchao's.
- FP8: `amax / 448` of a row, or of a tile of 128 x 128 as in transformers' `Fp8Quantize`; what is
  smaller than 2^-100 altogether becomes zero.

Of two codes that are equally near, the even one is taken. This file alone needs
torch, so the package's `__init__` does not import it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from inductor_q.exc import NotFinite
from inductor_q.formats.fp8 import FP8_FORMATS
from inductor_q.formats.minifloat import E2M1, E4M3, E5M2, E8M0, Minifloat
from inductor_q.formats.mx import E2M1_VALUES, MX_FORMATS
from inductor_q.formats.quant_format import QuantFormat
from inductor_q.formats.scale import RowScale, TileScale

#: Of how many elements the numbers in float32 are held at a time.
_SLAB = 1 << 24

_FLOAT8 = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}

#: A scale of scales below it would make a product on the way infinite.
_LEAST = math.ldexp(1.0, -100)


def encode(weight: Tensor, fmt: QuantFormat, what: str = "the weight") -> list[Tensor]:
    """Return the operands of `fmt`, one of ENCODED, for a weight [..., columns] of floats.

    They are flat, as the operands of a checkpoint that is loaded; rows run through all dimensions
    but the last. Looking for NaN synchronizes with the weight's device.

    Raises:
        NotFinite: the weight, which the error calls `what`.
    """
    w = weight.detach().reshape(-1, weight.shape[-1])
    check_finite(w, what)
    parts = zip(*_SCHEMES[fmt](w, fmt), strict=True)
    first, *scales = (torch.cat([part.reshape(-1) for part in each]) for each in parts)
    return [first, *scales]


def check_finite(weight: Tensor, what: str) -> None:
    """Raise NotFinite for a weight with NaN, infinity, or more than float32 holds. Synchronizes."""
    if weight.numel() and not torch.stack(weight.detach().aminmax()).float().isfinite().all():
        raise NotFinite(what=what)


Slabs = Iterator[tuple[Tensor, ...]]


def _mx(w: Tensor, fmt: QuantFormat) -> Slabs:
    number = _number(fmt)
    power = math.frexp(number.largest)[1] - 1
    for slab in _slabs(w):
        blocks = _blocks(slab, 32)
        amax = blocks.abs().amax(-1, keepdim=True)
        exponent = torch.frexp(amax)[1] - 1 - power + E8M0.bias
        code = torch.where(amax > 0, exponent.clamp(0, 254), 0)
        # The least scale is 2^-127, which a processor may take for zero: such blocks have 2^-126.
        inverse = torch.ldexp(torch.ones_like(blocks[..., :1]), E8M0.bias - code.clamp_min(1))
        codes = _nearest(blocks * inverse, number)
        yield _packed(codes, slab.shape[1], fmt), code.to(torch.uint8)


def _nvfp4(w: Tensor, fmt: QuantFormat) -> Slabs:
    by_row = "rows" in fmt.name
    amax = w.abs().amax(1, keepdim=True) if by_row else w.abs().amax().reshape(1, 1)
    whole = (amax.float() / (E4M3.largest * E2M1.largest)).clamp_min(_LEAST)
    for n, slab in enumerate(_slabs(w)):
        own = whole[n * _rows(w) :][: len(slab)] if by_row else whole
        blocks = _blocks(slab, 16)
        scale = blocks.abs().amax(-1) / E2M1.largest / own
        scale = scale.clamp(E4M3.smallest_normal, E4M3.largest).to(torch.float8_e4m3fn)
        codes = _nearest(blocks * (1 / own / scale.float()).unsqueeze(-1), E2M1)
        of_slab = own if by_row or n == 0 else own[:0]
        yield _packed(codes, slab.shape[1], fmt), scale.view(torch.uint8), of_slab


def _fp8(w: Tensor, fmt: QuantFormat) -> Slabs:
    number, (of,) = _number(fmt), fmt.shared
    height, width = (of.height, of.width) if isinstance(of, TileScale) else (1, w.shape[1])
    for slab in _slabs(w):
        rows, columns = slab.shape
        whole = functional.pad(slab.float(), (0, -columns % width, 0, -rows % height))
        tiles = whole.unflatten(1, (-1, width)).unflatten(0, (-1, height))
        amax = tiles.abs().amax((1, 3), keepdim=True)
        inverse = number.largest / torch.where(amax > _LEAST, amax, number.largest)
        codes = _nearest(tiles * inverse, number).reshape(whole.shape)
        yield codes[:rows, :columns], 1 / inverse


_SCHEMES: dict[QuantFormat, Callable[[Tensor, QuantFormat], Slabs]] = {
    **{fmt: _mx for fmt in MX_FORMATS if fmt.name.startswith("mx")},
    **{fmt: _nvfp4 for fmt in MX_FORMATS if fmt.name in ("nvfp4", "nvfp4_rows")},
    **{fmt: _fp8 for fmt in FP8_FORMATS if isinstance(fmt.shared[0], RowScale | TileScale)},
}

#: The formats that are written here.
ENCODED = tuple(_SCHEMES)


def _number(fmt: QuantFormat) -> Minifloat:
    number = E2M1 if fmt.codec == E2M1_VALUES else fmt.codec
    assert isinstance(number, Minifloat), f"{fmt.name} is of no minifloats"
    return number


def _rows(w: Tensor) -> int:
    """Return how many rows a slab has: whole tiles of 128."""
    return max(1, _SLAB // max(1, w.shape[1]) // 128) * 128


def _slabs(w: Tensor) -> tuple[Tensor, ...]:
    slabs: tuple[Tensor, ...] = w.split(_rows(w))
    return slabs


def _blocks(slab: Tensor, size: int) -> Tensor:
    """Cut rows into blocks [rows, blocks, size] of float32, the last filled up with zeros."""
    filled = functional.pad(slab.float(), (0, -slab.shape[1] % size))
    return filled.reshape(len(slab), -1, size)


def _nearest(values: Tensor, number: Minifloat) -> Tensor:
    """Return the codes of the nearest numbers, the largest one for what lies above it."""
    if number in _FLOAT8:
        values = values.clamp(-number.largest, number.largest)
        return values.to(_FLOAT8[number]).view(torch.uint8)
    magnitudes = [abs(value) for value in E2M1_VALUES.values[: number.magnitudes]]
    between = [(low + high) / 2 for low, high in itertools.pairwise(magnitudes)]
    limits = torch.tensor(between, device=values.device)
    limits[1::2] = limits[1::2].nextafter(limits.new_zeros(()))  # a tie goes up to an even code
    codes = torch.bucketize(values.abs(), limits, out_int32=True).to(torch.uint8)
    return codes | (values.signbit().to(torch.uint8) << 3)


def _packed(codes: Tensor, columns: int, fmt: QuantFormat) -> Tensor:
    """Drop what blocks were filled up with; put two codes of 4 bits in a byte, the first low."""
    codes = codes.flatten(1)[:, :columns].reshape(-1)
    if fmt.packing.bits == 8:
        return codes
    codes = functional.pad(codes, (0, codes.numel() % 2))
    return codes[0::2] | codes[1::2] << 4
