"""Triton kernels around a grouped product in FP8: rows gathered and cast, an adapter's part added.

A program has some rows of a part of the tile map (`ops/tile_map.py`), which are of one expert.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inductor_q.kernels.expert_calls import Scatter2Scatter
from inductor_q.kernels.expert_rows_triton import most_parts, rows_of, source_slots
from inductor_q.kernels.rounding import LARGEST, LEAST

E4M3 = torch.float8_e4m3fn


def cast_rows(call: Scatter2Scatter, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input's rows [R, C] in grouped order, in e4m3, and their scales [R].

    Where the product sums over the rows of the weights as they are stored, their scales are
    multiplied in. Nobody's rows are not written.
    """
    features, rows = call.in_features, 4  # the fastest of 20 on an H100, with the width and warps
    codes = torch.empty((call.rows, features), dtype=E4M3, device=x.device)
    scales = torch.empty((call.rows,), dtype=torch.float32, device=x.device)
    assert call.row_scale is not None
    cast[(most_parts(call) * (call.tile_rows // rows),)](
        x,
        call.order.contiguous(),
        call.tiles,
        call.row_scale.contiguous(),
        codes,
        scales,
        features,
        x.stride(0),
        LEAST=LEAST,
        LARGEST=LARGEST[E4M3],
        PARTS=call.tile_rows // rows,
        ROWS=rows,
        WIDTH=2048,
        TOP_K=source_slots(call),
        FACTOR=call.transposed,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return codes, scales


def add_adapter(call: Scatter2Scatter, y: Tensor, scaled: Tensor) -> None:
    """Add `scaled @ B_e'` to the grouped rows `y` [R, N]; `scaled` is [R, rank padded]."""
    assert call.lora_b is not None
    rows, width = min(64, call.tile_rows), 128
    parts = call.tile_rows // rows
    add_product[(most_parts(call) * parts, triton.cdiv(call.out_features, width))](
        y,
        scaled,
        call.lora_b,  # in any float dtype: the kernel casts
        call.tiles,
        call.out_features,
        call.rank,
        scaled.shape[1],
        *call.lora_b.stride(),
        PARTS=parts,
        ROWS=rows,
        RANK=triton.next_power_of_2(scaled.shape[1]),
        WIDTH=width,
        num_warps=4,
    )


@triton.jit
def cast(
    x,
    order,
    tiles,
    factor,
    codes,
    scales,
    features,
    x_row,
    LEAST: tl.constexpr,
    LARGEST: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """codes[i] = x[i's row] / scales[i], where FACTOR is true of x times its expert's factor.

    The second pass over a row finds it in the cache.
    """
    tile = 1 + tl.program_id(0) // PARTS
    first = tl.program_id(0) % PARTS * ROWS
    if tile <= tl.load(tiles):
        expert = tl.load(tiles + tile * 4).to(tl.int64)
        rows = tl.load(tiles + tile * 4 + 2)
        if first < rows:
            row, at, inside = rows_of(tiles, tile, first, rows, order, ROWS, TOP_K)
            column = tl.arange(0, WIDTH)
            x_at = x + at[:, None].to(tl.int64) * x_row + column[None, :]
            factor_at = factor + expert * features + column
            largest = tl.zeros((ROWS,), tl.float32)
            for start in range(0, features, WIDTH):
                left = start + column < features
                mask = inside[:, None] & left[None, :]
                value = tl.load(x_at + start, mask=mask, other=0).to(tl.float32)
                if FACTOR:
                    value *= tl.load(factor_at + start, mask=left, other=0)[None, :]
                largest = tl.maximum(largest, tl.max(tl.abs(value), axis=1))
            scale = tl.maximum(largest, LEAST) * (1.0 / LARGEST)
            tl.store(scales + row, scale, mask=inside)
            inverse = 1.0 / scale
            to = codes + row[:, None].to(tl.int64) * features + column[None, :]
            for start in range(0, features, WIDTH):
                left = start + column < features
                mask = inside[:, None] & left[None, :]
                value = tl.load(x_at + start, mask=mask, other=0).to(tl.float32)
                if FACTOR:
                    value *= tl.load(factor_at + start, mask=left, other=0)[None, :]
                tl.store(to + start, (value * inverse[:, None]).to(tl.float8e4nv), mask=mask)


@triton.jit
def add_product(
    y,
    scaled,
    b,
    tiles,
    features,
    rank,
    padded,
    b_expert,
    b_feature,
    b_rank,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """y[i] += B_e scaled[i], summed in float32 and rounded once."""
    tile = 1 + tl.program_id(0) // PARTS
    first = tl.program_id(0) % PARTS * ROWS
    if tile <= tl.load(tiles):
        expert = tl.load(tiles + tile * 4).to(tl.int64)
        rows = tl.load(tiles + tile * 4 + 2)
        if first < rows:
            row, _, inside = rows_of(tiles, tile, first, rows, tiles, ROWS, 0)
            row = row.to(tl.int64)
            column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
            r = tl.arange(0, RANK)
            mask = inside[:, None] & (r < padded)[None, :]
            p = tl.load(scaled + row[:, None] * padded + r[None, :], mask=mask, other=0)
            mask = (r < rank)[:, None] & (column < features)[None, :]
            b_at = b + expert * b_expert + column[None, :] * b_feature + r[:, None] * b_rank
            total = tl.dot(p, tl.load(b_at, mask=mask, other=0).to(p.dtype))
            mask = inside[:, None] & (column < features)[None, :]
            at = y + row[:, None] * features + column[None, :]
            total += tl.load(at, mask=mask, other=0).to(tl.float32)
            tl.store(at, total.to(y.dtype.element_ty), mask=mask)
