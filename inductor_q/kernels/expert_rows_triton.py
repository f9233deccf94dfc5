"""Triton kernels over the rows of experts: what surrounds a grouped GEMM.

The kernels that launch them import this file at their first use. Rows are grouped: each expert's
lie together (`ops/routing.py` has a picture). One program makes a sum, in a fixed order, so results
are the same every time.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from inductor_q.kernels.expert_calls import Scatter2Scatter
from inductor_q.kernels.gpu import on
from inductor_q.kernels.triton_launch import Repeated


def source_slots(call: Scatter2Scatter) -> int:
    """Return TOP_K of the kernels: grouped row i is row order[i] // TOP_K of x, or row i for 0."""
    return 0 if call.grouped_in else call.top_k


def most_parts(call: Scatter2Scatter) -> int:
    """Return how many parts the call's tile map has at most."""
    return min(call.num_experts, call.rows) + call.rows // call.tile_rows


def rows_in(call: Scatter2Scatter, out: Tensor) -> Tensor:
    """Write the input's rows in grouped order to `out` [R, K], whose rows may be apart."""
    x = call.x.contiguous()
    collect[(triton.cdiv(call.rows, 8), triton.cdiv(call.in_features, 256))](
        x,
        call.order.contiguous(),
        out,
        call.rows,
        call.in_features,
        x.stride(0),
        out.stride(0),
        TOP_K=source_slots(call),
        ROWS=8,
        WIDTH=256,
    )
    return out


def rows_out(call: Scatter2Scatter, y: Tensor) -> Tensor:
    """Make the op's first result of the grouped rows, some of which no kernel has written."""
    return plan_rows_out(call)(call, y)


def plan_rows_out(call: Scatter2Scatter) -> Callable[[Scatter2Scatter, Tensor], Tensor]:
    """Return `rows_out` for all calls of a kind, and for grouped rows in memory of their own."""
    rows, tokens, features = call.rows, call.tokens, call.out_features
    gated = call.gates is not None
    if call.grouped_out:
        launch = Repeated(
            finish,
            (triton.cdiv(rows, 32), triton.cdiv(features, 256), 1),
            (features, rows, call.num_experts),
            {"ROWS": 32, "WIDTH": 256, "GATED": gated},
        )
    else:
        launch = Repeated(
            combine,
            (tokens, triton.cdiv(features, 1024), 1),
            (features, call.num_experts),
            {"TOP_K": call.top_k, "WIDTH": 1024, "GATED": gated},
        )

    def serve(call: Scatter2Scatter, y: Tensor) -> Tensor:
        gates = y if call.gates is None else call.gates.contiguous()
        if call.grouped_out:
            launch((y, gates, call.order.contiguous(), call.offsets))
            return y
        out = y.new_empty((tokens, features))
        launch((y, gates, call.inverse.contiguous(), call.offsets, out))
        return out

    return serve


@triton.jit
def tile_map(
    offsets, tiles, experts, most, HEIGHT: tl.constexpr, STEP: tl.constexpr, EXPERTS: tl.constexpr
):
    """Compute `ops.tile_map`, one expert per program; EXPERTS is a power of two that holds them.

    There is room for `most` parts, which offsets beyond the last row would exceed.
    """
    expert = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    begin = tl.load(offsets + e, mask=e < experts, other=0)
    end = tl.load(offsets + e + 1, mask=e < experts, other=0)
    parts = (end - begin + (HEIGHT - 1)) // HEIGHT
    if expert == 0:
        tl.store(tiles, tl.minimum(tl.sum(parts), most))
    before = tl.sum(tl.where(e < expert, parts, 0))
    to = tiles + (1 + before) * 4
    first = tl.load(offsets + expert)
    rows = tl.load(offsets + expert + 1) - first
    mine = (rows + (HEIGHT - 1)) // HEIGHT
    height = ((rows + mine - 1) // tl.maximum(mine, 1) + (STEP - 1)) // STEP * STEP
    for start in range(0, mine, 64):
        part = start + tl.arange(0, 64)
        at = to + part * 4
        done = part * height
        real = (part < mine) & (before + part < most)
        tl.store(at, tl.full((64,), 0, tl.int32) + expert, mask=real)
        tl.store(at + 1, first + done, mask=real)
        tl.store(at + 2, tl.minimum(rows - done, height), mask=real)
        tl.store(at + 3, tl.full((64,), 0, tl.int32), mask=real)


@triton.jit
def collect(
    x,
    order,
    out,
    total_rows,
    features,
    x_row,
    out_row,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """out[i] = x[order[i] // TOP_K], the token of a slot, or x[i] if TOP_K is 0."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < total_rows
    at = row
    if TOP_K:
        at = tl.load(order + row, mask=inside, other=0) // TOP_K
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = inside[:, None] & (column < features)[None, :]
    value = tl.load(x + at[:, None] * x_row + column[None, :], mask=mask)
    tl.store(out + row[:, None] * out_row + column[None, :], value, mask=mask)


def project_rows(
    call: Scatter2Scatter,
    x: Tensor,
    *,
    depth: int,
    stages: int,
) -> tuple[Tensor, Tensor | None]:
    """Return `x @ A_e'` [R, r], the op's second result, and the same scaled, [R, r padded to 16].

    Args:
        depth, stages: those of the loop over features.
    """
    r = call.rank
    if call.lora_a is None or r == 0:
        return x.new_empty(call.rows, r), None
    rank = x.new_zeros(call.rows, r)
    padded = -(-r // 16) * 16
    scaled = x.new_empty(call.rows, padded)
    rows = min(64, call.tile_rows)
    parts = call.tile_rows // rows
    with on(x.device):
        project[(most_parts(call) * parts,)](
            x,
            call.lora_a,  # in any float dtype: the kernel casts
            call.order.contiguous(),
            call.tiles,
            rank,
            scaled,
            call.scaling,
            call.in_features,
            r,
            padded,
            x.stride(0),
            *call.lora_a.stride(),
            PARTS=parts,
            ROWS=rows,
            RANK=triton.next_power_of_2(padded),
            DEPTH=depth,
            TOP_K=source_slots(call),
            num_warps=4,
            num_stages=stages,
        )
    return rank, scaled


@triton.jit
def rows_of(tiles, tile, first, rows, order, ROWS: tl.constexpr, TOP_K: tl.constexpr):
    """Return grouped rows of a part of `tiles`, ROWS from `first` on, the rows of the input that
    they are (their own where TOP_K is 0), and which of them the part has."""
    local = first + tl.arange(0, ROWS)
    inside = local < rows
    row = tl.load(tiles + tile * 4 + 1) + local
    at = row
    if TOP_K:
        at = tl.load(order + row, mask=inside, other=0) // TOP_K
    return row, at, inside


@triton.jit
def project(
    x,
    a,
    order,
    tiles,
    out,
    scaled,
    scaling,
    features,
    rank,
    padded,
    x_row,
    a_expert,
    a_rank,
    a_feature,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    DEPTH: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """out[i] = A_e x[i's row], [R, rank]; scaled = scaling * out, [R, padded], zero beyond rank.

    A program computes ROWS rows of a part of `tiles` (`ops.tile_map`), which has PARTS such pieces.
    """
    tile = 1 + tl.program_id(0) // PARTS
    first = tl.program_id(0) % PARTS * ROWS
    if tile <= tl.load(tiles):
        expert = tl.load(tiles + tile * 4).to(tl.int64)
        rows = tl.load(tiles + tile * 4 + 2)
        if first < rows:
            row, at, inside = rows_of(tiles, tile, first, rows, order, ROWS, TOP_K)
            r = tl.arange(0, RANK)
            k = tl.arange(0, DEPTH)
            x_at = x + at[:, None].to(tl.int64) * x_row + k[None, :]
            a_at = a + expert * a_expert + r[None, :] * a_rank + k[:, None] * a_feature
            total = tl.zeros((ROWS, RANK), tl.float32)
            for start in range(0, features, DEPTH):
                left = start + k < features
                rows_part = tl.load(x_at + start, mask=inside[:, None] & left[None, :], other=0)
                a_mask = left[:, None] & (r < rank)[None, :]
                a_part = tl.load(a_at + start * a_feature, mask=a_mask, other=0)
                total = tl.dot(rows_part, a_part.to(rows_part.dtype), total)
            to = row[:, None].to(tl.int64)
            mask = inside[:, None] & (r < rank)[None, :]
            tl.store(out + to * rank + r[None, :], total.to(out.dtype.element_ty), mask=mask)
            mask = inside[:, None] & (r < padded)[None, :]
            value = (total * scaling).to(scaled.dtype.element_ty)
            tl.store(scaled + to * padded + r[None, :], value, mask=mask)


@triton.jit
def gram(
    narrow,
    wide,
    order,
    offsets,
    out,
    rank,
    features,
    out_expert,
    out_rank,
    out_feature,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    NARROW_TOP_K: tl.constexpr,
    WIDE_TOP_K: tl.constexpr,
):
    """out[e] = narrow' wide over the rows of expert e; a program has WIDTH columns of `wide`.

    Grouped row i is row order[i] // TOP_K of a side, or row i if its TOP_K is 0.
    """
    expert = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    r = tl.arange(0, RANK)
    total = tl.zeros((RANK, WIDTH), tl.float32)
    end = tl.load(offsets + expert + 1)
    for start in range(tl.load(offsets + expert), end, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = row < end
        narrow_at = row
        wide_at = row
        if NARROW_TOP_K:
            narrow_at = tl.load(order + row, mask=inside, other=0) // NARROW_TOP_K
        if WIDE_TOP_K:
            wide_at = tl.load(order + row, mask=inside, other=0) // WIDE_TOP_K
        mask = inside[None, :] & (r < rank)[:, None]
        p = tl.load(
            narrow + narrow_at[None, :].to(tl.int64) * rank + r[:, None], mask=mask, other=0
        )
        mask = inside[:, None] & (column < features)[None, :]
        at = wide + wide_at[:, None].to(tl.int64) * features + column[None, :]
        q = tl.load(at, mask=mask, other=0)
        total = tl.dot(p, q, total)
    to = out + expert * out_expert + r[:, None] * out_rank + column[None, :] * out_feature
    mask = (r < rank)[:, None] & (column < features)[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def combine(
    rows,
    gates,
    inverse,
    offsets,
    out,
    features,
    experts,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
):
    """out[token] = the sum of gate * rows[inverse[slot]] in float32, over its slots in order."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < features
    owned = tl.load(offsets + experts)
    total = tl.zeros((WIDTH,), tl.float32)
    for j in tl.static_range(TOP_K):
        place = tl.load(inverse + token * TOP_K + j)
        mask = column < tl.where(place < owned, features, 0)
        part = tl.load(rows + place * features + column, mask=mask, other=0).to(tl.float32)
        if GATED:
            part *= tl.load(gates + token * TOP_K + j).to(tl.float32)
        total += part
    tl.store(out + token * features + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def finish(
    rows,
    gates,
    order,
    offsets,
    features,
    total_rows,
    experts,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
):
    """Multiply grouped rows with their gates and write zeros to nobody's rows, in place."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    owned = tl.load(offsets + experts)
    if GATED or tl.program_id(0) * ROWS + ROWS > owned:
        column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        mask = (row < total_rows)[:, None] & (column < features)[None, :]
        at = rows + row[:, None].to(tl.int64) * features + column[None, :]
        value = tl.load(at, mask=mask & (row < owned)[:, None], other=0)
        if GATED:
            slot = tl.load(order + row, mask=row < total_rows, other=0)
            gate = tl.load(gates + slot, mask=row < total_rows, other=0).to(tl.float32)
            value = (value.to(tl.float32) * gate[:, None]).to(rows.dtype.element_ty)
        tl.store(at, value, mask=mask)
