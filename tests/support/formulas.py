"""Define what formats mean in another way than `QuantFormat.decode`: in float64, without bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

NAN, INF = float("nan"), float("inf")


def number(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """Return a floating-point number of a sign, an exponent and a mantissa."""
    above, m = divmod(code, 2**mantissa_bits)
    sign, e = divmod(above, 2**exponent_bits)
    magnitude = (2**mantissa_bits + m) * 2.0 ** (e - 1) if e else float(m)
    return math.ldexp(-magnitude if sign else magnitude, 1 - bias - mantissa_bits)


def _e5m2(code: int) -> float:
    e, m = divmod(code % 128, 4)
    return number(code, 5, 2, 15) if e < 31 else NAN if m else math.copysign(INF, 127.5 - code)


E2M1 = torch.tensor([number(code, 2, 1, 1) for code in range(16)], dtype=torch.float64)
E4M3 = torch.tensor(
    [NAN if code % 128 == 127 else number(code, 4, 3, 7) for code in range(256)],
    dtype=torch.float64,
)
E5M2 = torch.tensor([_e5m2(code) for code in range(256)], dtype=torch.float64)
E8M0 = torch.tensor([*(2.0 ** (code - 127) for code in range(255)), NAN], dtype=torch.float64)
E4M4 = torch.tensor([number(code, 4, 4, 11) for code in range(256)], dtype=torch.float64)


def _nibbles(qweight: Tensor, rows: int, columns: int) -> Tensor:
    """Split bytes into nibbles, the low one of each byte first."""
    in_bytes = qweight.reshape(-1).view(torch.uint8).long()
    both = torch.stack([in_bytes % 16, in_bytes // 16], 1).flatten()
    return both[: rows * columns].reshape(rows, columns)


def _by_group(stored: Tensor, columns: int, group: int) -> Tensor:
    """Repeat what is stored [rows, groups] to [rows, columns]."""
    return stored.reshape(-1, -(-columns // group)).repeat_interleave(group, 1)[:, :columns]


def mxfp4(operands: Sequence[Tensor], rows: int, columns: int) -> Tensor:
    qweight, scale = operands
    values = E2M1[_nibbles(qweight, rows, columns)]
    return values * _by_group(E8M0[scale.long()], columns, 32)


def nvfp4(operands: Sequence[Tensor], rows: int, columns: int) -> Tensor:
    qweight, scale, global_scale = operands
    scales = (E4M3[scale.long()] * global_scale.double()).float().double()  # is rounded once
    return E2M1[_nibbles(qweight, rows, columns)] * _by_group(scales, columns, 16)


def nvfp4_rows(operands: Sequence[Tensor], rows: int, columns: int) -> Tensor:
    qweight, scale, global_scale = operands
    scales = _by_group(E4M3[scale.long()], columns, 16) * global_scale.double()[:, None]
    return E2M1[_nibbles(qweight, rows, columns)] * scales.float().double()  # is rounded once


def nvfp4_divided_rows(operands: Sequence[Tensor], rows: int, columns: int) -> Tensor:
    qweight, scale, divisor = operands
    scales = _by_group(E4M3[scale.long()], columns, 16) / divisor.double()[:, None]
    return E2M1[_nibbles(qweight, rows, columns)] * scales.float().double()  # is rounded once


def fp8_e4m3_128x128(operands: Sequence[Tensor], rows: int, columns: int) -> Tensor:
    qweight, scale = operands
    tiles = scale.double().reshape(-1, -(-columns // 128)).repeat_interleave(128, 0)[:rows]
    by_column = tiles.repeat_interleave(128, 1)[:, :columns]
    return E4M3[qweight.view(torch.uint8).long()].reshape(rows, columns) * by_column


def int4_g128(operands: Sequence[Tensor], rows: int, columns: int) -> Tensor:
    qweight, scale, zero_point = operands
    codes = _nibbles(qweight, rows, columns).double()
    zeros = _by_group(zero_point.double(), columns, 128)
    return (codes - zeros) * _by_group(scale.double(), columns, 128)


def fp8_e4m3_row(operands: Sequence[Tensor], rows: int, columns: int) -> Tensor:
    qweight, scale = operands
    return E4M3[qweight.long()].reshape(rows, columns) * scale.double()[:, None]


def int4_plain_g32(operands: Sequence[Tensor], rows: int, columns: int) -> Tensor:
    qweight, scale, zero_point = operands
    codes = _nibbles(qweight, rows, columns)
    numbers = torch.where(codes > 7, codes - 16, codes).double()
    scaled = (numbers * _by_group(scale.double(), columns, 32)).float().double()  # is rounded once
    return scaled + _by_group(zero_point.double(), columns, 32)


def hqq4_g64_bf16(operands: Sequence[Tensor], rows: int, columns: int) -> Tensor:
    qweight, scale, zero_point = operands
    codes = _nibbles(qweight, rows, columns).double().reshape(-1)
    scales, zeros = (t.double().repeat_interleave(64)[: codes.numel()] for t in (scale, zero_point))
    difference = (codes - zeros).float().to(torch.bfloat16)  # is rounded as HQQ rounds it
    return (difference.double() * scales).reshape(rows, columns)


def int8_g32(operands: Sequence[Tensor], rows: int, columns: int) -> Tensor:
    qweight, scale, zero_point = operands
    codes = qweight.view(torch.int8).double().reshape(rows, columns)
    zeros = _by_group(zero_point.double(), columns, 32)
    return (codes - zeros) * _by_group(scale.double(), columns, 32)


def int8_absmax(operands: Sequence[Tensor], rows: int, columns: int) -> Tensor:
    qweight, absmax = operands
    factor = torch.tensor(1 / 127).double()  # is float32's
    scale = (absmax.double() * factor).float().double()  # is rounded once
    return qweight.view(torch.int8).double().reshape(rows, columns) * scale[:, None]


def fp8_e5m2_tensor(operands: Sequence[Tensor], rows: int, columns: int) -> Tensor:
    qweight, scale = operands
    return E5M2[qweight.long()].reshape(rows, columns) * scale.double()


def mxfp8_e4m3(operands: Sequence[Tensor], rows: int, columns: int) -> Tensor:
    qweight, scale = operands
    values = E4M3[qweight.long()].reshape(rows, columns)
    return values * _by_group(E8M0[scale.long()], columns, 32)


FORMULAS: dict[str, Callable[[Sequence[Tensor], int, int], Tensor]] = {
    f.__name__: f
    for f in (
        *(mxfp4, mxfp8_e4m3, nvfp4, nvfp4_rows, nvfp4_divided_rows),
        *(int4_g128, int4_plain_g32, hqq4_g64_bf16, int8_g32, int8_absmax),
        *(fp8_e4m3_row, fp8_e5m2_tensor, fp8_e4m3_128x128),
    )
}


def values(name: str, operands: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Return the float32 values of a weight in the format called `name`."""
    columns = shape[-1]
    return FORMULAS[name](operands, math.prod(shape[:-1]), columns).float().reshape(tuple(shape))


# --- all that a weight can consist of ------------------------------------------------------------

#: These scales round, overflow, are subnormal or no numbers.
SPECIAL = (1.0, 0.1, -3.7, -0.0, 1e-38, 1.4e-45, 3e38, INF, NAN, 65504.0)

#: Every nibble, the even ones low.
_ALL = torch.tensor([low + 16 * (low + 1) for low in range(0, 16, 2)], dtype=torch.uint8)
_CODES = torch.arange(256).to(torch.uint8)


def exhaustive(name: str) -> tuple[list[Tensor], tuple[int, int]]:
    """Return operands and shape of a weight that has every code under every scale and zero point.

    Scales that are coded take all their codes, the others those of SPECIAL.
    """
    n = len(SPECIAL)
    special = torch.tensor(SPECIAL)
    if name == "mxfp4":
        return [_ALL.repeat(256 * 2), _CODES], (256, 32)
    if name == "nvfp4":
        return [_ALL.repeat(256), _CODES, torch.tensor([0.1])], (256, 16)
    if name in ("nvfp4_rows", "nvfp4_divided_rows"):
        return [_ALL.repeat(256 * n), _CODES.repeat(n), special], (n, 256 * 16)
    if name == "fp8_e4m3_128x128":  # the last tiles of rows and columns are cut
        codes = _CODES.repeat(130 * n // 2)
        return [codes, torch.cat([special, special.flip(0)])], (130, n * 128)
    if name == "int4_g128":
        zeros = _CODES.repeat_interleave(n)
        return [_ALL.repeat(256 * n * 8), special.repeat(256), zeros], (256, n * 128)
    if name == "int4_plain_g32":
        zeros = special.repeat_interleave(n)
        return [_ALL.repeat(n * n * 2), special.repeat(n), zeros], (n, n * 32)
    if name == "hqq4_g64_bf16":  # beside the special ones, zero points that leave bits to round
        # (and no subnormal ones: Triton's interpreter misreads them in bfloat16)
        special = special[(special.abs() < 2e-38).logical_not() | (special == 0)].to(torch.bfloat16)
        zeros = torch.cat([special, torch.linspace(-16, 32, 256 - len(special)).to(torch.bfloat16)])
        scales, n = special.repeat(256), len(special)
        return [_ALL.repeat(256 * n * 4), scales, zeros.repeat_interleave(n)], (256, n * 64)
    if name == "int8_g32":  # eight groups have all codes
        groups = special.repeat_interleave(8)
        zeros = torch.arange(-128, 128).to(torch.int8).repeat_interleave(8 * n)
        return [_CODES.repeat(256 * n), groups.repeat(256), zeros], (256, n * 256)
    if name == "mxfp8_e4m3":
        return [_CODES.repeat(256), _CODES.repeat_interleave(8)], (256, 256)
    if name == "fp8_e5m2_tensor":
        return [_CODES, torch.tensor([0.1])], (1, 256)
    assert name in ("fp8_e4m3_row", "int8_absmax"), name
    return [_CODES.repeat(n), special], (n, 256)


def cases(name: str) -> list[tuple[list[Tensor], tuple[int, int]]]:
    """Return `exhaustive`, and once per SPECIAL number where one number scales the whole tensor."""
    operands, shape = exhaustive(name)
    if name not in ("nvfp4", "fp8_e5m2_tensor"):
        return [(operands, shape)]
    return [([*operands[:-1], torch.tensor([factor])], shape) for factor in SPECIAL]
