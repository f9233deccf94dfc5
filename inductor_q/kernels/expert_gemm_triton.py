"""Triton kernels of scatter2scatter: a grouped GEMM that decodes its weights in the loop.

The kernel that launches them imports this file at its first use. Rows are grouped: each expert's
lie together. The GEMM is given the device function that turns bytes into values, so nothing here
looks at a format's name.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weight_tile(
    weight,
    scales,
    expert,
    row,
    column,
    rows,
    columns,
    row_bytes,
    row_mask,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    DECODE: tl.constexpr,
    BYTES: tl.constexpr,
    EVEN: tl.constexpr,
    dtype: tl.constexpr,
):
    """Load [ROWS, COLUMNS] of an expert as stored, in `dtype`, from `column` on, zero where masked.

    GROUP columns share one of the scales [E, columns / GROUP, rows]; it is 0 for a dense weight.
    DECODE maps bytes to the values of their first and second codes; with BYTES it maps a code, its
    scale and a table, of which there is none, to a value.
    """
    first = (expert * rows + row.to(tl.int64))[:, None]
    if GROUP == 0:
        c = column + tl.arange(0, COLUMNS)[None, :]
        mask = row_mask[:, None] & (EVEN | (c < columns))
        tile = tl.load(weight + first * columns + c, mask=mask, other=0).to(dtype)
    else:
        PER_BYTE: tl.constexpr = 1 if BYTES else 2
        c = column // PER_BYTE + tl.arange(0, COLUMNS // PER_BYTE)[None, :]
        mask = row_mask[:, None] & (EVEN | (c < row_bytes))
        packed = tl.load(weight + first * row_bytes + c, mask=mask, other=0)
        GROUPS: tl.constexpr = COLUMNS // GROUP if COLUMNS > GROUP else 1
        group = column // GROUP + tl.arange(0, GROUPS)[None, :]
        mask = row_mask[:, None] & (EVEN | (group * GROUP < columns))
        at = (expert * (columns // GROUP) + group) * rows + row[:, None]
        scale = tl.load(scales + at, mask=mask, other=0)
        if BYTES:
            codes = tl.reshape(packed, (ROWS, GROUPS, COLUMNS // GROUPS))
            tile = DECODE(codes.to(tl.int32), scale[:, :, None], None).to(dtype)
        else:
            even, odd = DECODE(packed)
            tile = tl.reshape(tl.join(even, odd), (ROWS, GROUPS, COLUMNS // GROUPS))
            tile = (tile.to(tl.float32) * scale[:, :, None]).to(dtype)
    return tl.reshape(tile, (ROWS, COLUMNS))


@triton.jit
def expert_gemm(
    out,
    x,
    order,
    tiles,
    weight,
    scales,
    projected,
    factor,
    bias,
    in_features,
    out_features,
    row_bytes,
    padded,
    factor_expert,
    factor_feature,
    factor_rank,
    rank,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
    RANK: tl.constexpr,
    GROUP: tl.constexpr,
    DECODE: tl.constexpr,
    BYTES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TOP_K: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """out[i] = W_e x[i's row] + factor_e projected[i] + bias_e, in grouped order.

    A program computes FEATURES of the output for ROWS rows of one of `tiles` (`ops.tile_map`), cut
    into PARTS such pieces. The weight is the left operand, so few rows make a narrow tile, not one
    of padding. It is stored as [E, out, in], or as [E, in, out] if TRANSPOSED. RANK is 0 without an
    adapter. EVEN says that DEPTH and FEATURES divide what they cut.
    """
    blocks = tl.cdiv(out_features, FEATURES)
    cut = tl.program_id(0) // blocks
    tile = 1 + cut // PARTS
    first = cut % PARTS * ROWS
    if tile <= tl.load(tiles) and first < tl.load(tiles + tile * 4 + 2):
        dtype: tl.constexpr = x.dtype.element_ty
        expert = tl.load(tiles + tile * 4).to(tl.int64)
        local = first + tl.arange(0, ROWS)
        real_row = local < tl.load(tiles + tile * 4 + 2)
        inside = real_row[None, :]
        row = tl.load(tiles + tile * 4 + 1) + local
        at = row
        if TOP_K:
            at = tl.load(order + row, mask=real_row, other=0) // TOP_K
        feature0 = tl.program_id(0) % blocks * FEATURES
        feature = feature0 + tl.arange(0, FEATURES)
        real = EVEN | (feature < out_features)
        d = tl.arange(0, DEPTH)
        x_at = x + at[None, :].to(tl.int64) * in_features + d[:, None]
        total = tl.zeros((FEATURES, ROWS), tl.float32)
        for start in range(0, in_features, DEPTH):
            left = EVEN | (start + d < in_features)
            part = tl.load(x_at + start, mask=inside & left[:, None], other=0)
            if TRANSPOSED:
                w = weight_tile(
                    weight,
                    scales,
                    expert,
                    start + d,
                    feature0,
                    in_features,
                    out_features,
                    row_bytes,
                    left,
                    DEPTH,
                    FEATURES,
                    GROUP,
                    DECODE,
                    BYTES,
                    EVEN,
                    dtype,
                )
                w = tl.trans(w)
            else:
                w = weight_tile(
                    weight,
                    scales,
                    expert,
                    feature,
                    start,
                    out_features,
                    in_features,
                    row_bytes,
                    real,
                    FEATURES,
                    DEPTH,
                    GROUP,
                    DECODE,
                    BYTES,
                    EVEN,
                    dtype,
                )
            total = tl.dot(w, part, total)
        if RANK > 0:
            r = tl.arange(0, RANK)
            part_at = projected + row[None, :].to(tl.int64) * padded + r[:, None]
            part = tl.load(part_at, mask=inside & (r < padded)[:, None], other=0)
            b_at = factor + expert * factor_expert + feature[:, None].to(tl.int64) * factor_feature
            b_mask = (feature < out_features)[:, None] & (r < rank)[None, :]
            b = tl.load(b_at + r[None, :] * factor_rank, mask=b_mask, other=0)
            total = tl.dot(b.to(dtype), part, total)
        mask = (feature < out_features)[:, None]
        if BIAS:
            b_at = bias + expert * out_features + feature[:, None]
            total += tl.load(b_at, mask=mask, other=0).to(tl.float32)
        to = out + row[None, :].to(tl.int64) * out_features + feature[:, None]
        tl.store(to, total.to(dtype), mask=mask & inside)
