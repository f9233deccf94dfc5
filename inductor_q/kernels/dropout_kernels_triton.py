"""The Triton kernels of `dropout_triton`, which imports this file at their first use."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from inductor_q.kernels import dropout

_MULTIPLIER = tl.constexpr(dropout.MULTIPLIER)
_WEYL = tl.constexpr(dropout.WEYL)
_ROUNDS = tl.constexpr(dropout.ROUNDS)
_ROWS = tl.constexpr(dropout.ROWS)
_ADAPTER_SHIFT = tl.constexpr(dropout.ADAPTER_SHIFT)


@triton.jit
def _philox(slot, column, adapter, seeds, index):
    """Return the two words of each call of Philox-2x32: for [S, 1] slots and [1, C] columns."""
    seed = tl.load(seeds + index)
    key = (seed & 0xFFFFFFFF).to(tl.uint32)
    c0 = slot.to(tl.uint32)
    number = tl.full(column.shape, adapter, tl.int32) << _ADAPTER_SHIFT
    c1 = (column | number).to(tl.uint32) ^ (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        high = tl.umulhi(c0, tl.full(c0.shape, _MULTIPLIER, tl.uint32))
        low = c0 * tl.full(c0.shape, _MULTIPLIER, tl.uint32)
        c0 = high ^ key ^ c1
        c1 = low
        key = key + tl.full(key.shape, _WEYL, tl.uint32)
    return c0, c1


@triton.jit
def _dropped(x, word, row, column, rows, columns, stride, least, HALF: tl.constexpr):
    """Load a tile of x and drop what its half of `word` says; return what is kept, too."""
    inside = (row < rows) & (column < columns)
    value = tl.load(x + row.to(tl.int64) * stride + column, mask=inside, other=0.0)
    if HALF == 0:
        number = word & 0xFFFF
    else:
        number = word >> 16
    keep = number >= least
    return tl.where(keep, value, 0.0), keep


@triton.jit
def project(
    x,
    a,
    seeds,
    partial,
    rows,
    columns,
    stride,
    index,
    least,
    RANK: tl.constexpr,
    TOTAL: tl.constexpr,
    LANES: tl.constexpr,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Project 256 rows by one adapter, over PART columns of x."""
    call = tl.program_id(0)
    part = tl.program_id(1)
    adapter = tl.program_id(2)
    lane = tl.arange(0, _ROWS)[:, None]
    rank = tl.arange(0, LANES)[None, :]
    row = call * (4 * _ROWS) + lane
    threshold = least.to(tl.uint32)
    sum0 = tl.zeros((_ROWS, LANES), tl.float32)
    sum1 = tl.zeros((_ROWS, LANES), tl.float32)
    sum2 = tl.zeros((_ROWS, LANES), tl.float32)
    sum3 = tl.zeros((_ROWS, LANES), tl.float32)
    for start in range(0, PART, COLUMNS):
        column = part * PART + start + tl.arange(0, COLUMNS)
        weight = tl.load(
            a + (adapter * RANK + rank) * columns + column[:, None],
            mask=(rank < RANK) & (column[:, None] < columns),
            other=0.0,
        )
        column = column[None, :]
        first, second = _philox(call * _ROWS + lane, column, adapter, seeds, index)
        x0, _ = _dropped(x, first, row, column, rows, columns, stride, threshold, 0)
        sum0 = tl.dot(x0, weight, sum0)
        x1, _ = _dropped(x, first, row + _ROWS, column, rows, columns, stride, threshold, 1)
        sum1 = tl.dot(x1, weight, sum1)
        x2, _ = _dropped(x, second, row + 2 * _ROWS, column, rows, columns, stride, threshold, 0)
        sum2 = tl.dot(x2, weight, sum2)
        x3, _ = _dropped(x, second, row + 3 * _ROWS, column, rows, columns, stride, threshold, 1)
        sum3 = tl.dot(x3, weight, sum3)
    to = partial + (part * rows + row).to(tl.int64) * TOTAL + adapter * RANK + rank
    inside = rank < RANK
    tl.store(to, sum0, mask=inside & (row < rows))
    tl.store(to + _ROWS * TOTAL, sum1, mask=inside & (row + _ROWS < rows))
    tl.store(to + 2 * _ROWS * TOTAL, sum2, mask=inside & (row + 2 * _ROWS < rows))
    tl.store(to + 3 * _ROWS * TOTAL, sum3, mask=inside & (row + 3 * _ROWS < rows))


@triton.jit
def grad(
    x,
    a,
    seeds,
    of_low,
    partial,
    of_x,
    rows,
    columns,
    stride,
    low_stride,
    index,
    least,
    scale,
    COUNT: tl.constexpr,
    RANK: tl.constexpr,
    TOTAL: tl.constexpr,
    LANES: tl.constexpr,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Both gradients over PART rows and COLUMNS columns of x; that of A is a part of a sum."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    part = tl.program_id(1)
    lane = tl.arange(0, _ROWS)[:, None]
    rank = tl.arange(0, LANES)
    threshold = least.to(tl.uint32)
    for adapter in range(COUNT):
        weight = tl.load(
            a + (adapter * RANK + rank[:, None]) * columns + column,
            mask=(rank[:, None] < RANK) & (column < columns),
            other=0.0,
        )
        total = tl.zeros((LANES, COLUMNS), tl.float32)
        for start in range(0, PART, 4 * _ROWS):
            call = part * (PART // (4 * _ROWS)) + start // (4 * _ROWS)
            row = part * PART + start + lane
            words = _philox(call * _ROWS + lane, column, adapter, seeds, index)
            for quarter in tl.static_range(4):
                value, keep = _dropped(
                    x,
                    words[quarter // 2],
                    row + quarter * _ROWS,
                    column,
                    rows,
                    columns,
                    stride,
                    threshold,
                    quarter % 2,
                )
                at = row + quarter * _ROWS
                low = tl.load(
                    of_low + at.to(tl.int64) * low_stride + adapter * RANK + rank[None, :],
                    mask=(at < rows) & (rank[None, :] < RANK),
                    other=0.0,
                )
                total = tl.dot(tl.trans(low), value, total)
                back = tl.where(keep, tl.dot(low, weight) * scale, 0.0)
                to = of_x + at.to(tl.int64) * columns + column
                inside = (at < rows) & (column < columns)
                if adapter > 0:
                    back += tl.load(to, mask=inside, other=0.0).to(tl.float32)
                tl.store(to, back.to(of_x.dtype.element_ty), mask=inside)
        at = (part * TOTAL + adapter * RANK + rank[:, None]).to(tl.int64) * columns + column
        tl.store(partial + at, total, mask=(rank[:, None] < RANK) & (column < columns))
        tl.debug_barrier()  # the next adapter adds to what this one's threads have written


@triton.jit
def finish(
    partial,
    out,
    rows,
    columns,
    width,
    stride,
    scale,
    PARTS: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up the parts in their order; columns behind the parts' become zero."""
    row = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    source = partial + row.to(tl.int64) * columns + column
    total = tl.zeros((HEIGHT, BLOCK), tl.float32)
    for _ in range(PARTS):
        total += tl.load(source, mask=inside, other=0.0)
        source += rows * columns
    to = out + row.to(tl.int64) * stride + column
    tl.store(to, (total * scale).to(out.dtype.element_ty), mask=(row < rows) & (column < width))
