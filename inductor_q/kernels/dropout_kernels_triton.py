"""The Triton kernels of `dropout_triton`, which imports this file at their first use."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from inductor_q.kernels import dropout

_M0 = tl.constexpr(dropout.MULTIPLIERS[0])
_M1 = tl.constexpr(dropout.MULTIPLIERS[1])
_W0 = tl.constexpr(dropout.WEYL[0])
_W1 = tl.constexpr(dropout.WEYL[1])
_ROUNDS = tl.constexpr(dropout.ROUNDS)
_ROWS = tl.constexpr(dropout.ROWS)
_ROW_SHIFT = tl.constexpr(dropout.SHIFTS[0])
_COLUMN_SHIFT = tl.constexpr(dropout.SHIFTS[1])


@triton.jit
def _times(c, MULTIPLIER: tl.constexpr):
    """Return the high and the low half of a product of 32-bit numbers."""
    by = tl.full(c.shape, MULTIPLIER, tl.uint32)
    return tl.umulhi(c, by), c * by


@triton.jit
def _keep(row, call, adapter, seeds, index, least, higher, COLUMNS: tl.constexpr):
    """Return what is kept of two tiles [ROWS, COLUMNS], of the rows and of those ROWS below.

    `row` [ROWS, 1] and `call` [1, COLUMNS / 8] count the calls. Until the third round the operands
    are a row and a column: most of two rounds costs nothing.
    """
    seed = tl.load(seeds + index)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c0 = row.to(tl.uint32)
    c1 = call.to(tl.uint32)
    c2 = tl.full((1, 1), adapter, tl.uint32)
    c3 = tl.full((1, 1), 0, tl.uint32)
    shift = (c0 * _ROW_SHIFT + c1 * _COLUMN_SHIFT + k0) & 0xFF
    kept = least.to(tl.uint32) + (shift < higher.to(tl.uint32)).to(tl.uint32)
    kept = tl.reshape(tl.broadcast_to(kept[:, :, None], (_ROWS, COLUMNS // 8, 8)), (_ROWS, COLUMNS))
    for _ in tl.static_range(_ROUNDS):
        high0, low0 = _times(c0, _M0)
        high1, low1 = _times(c2, _M1)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + tl.full(k0.shape, _W0, tl.uint32)
        k1 = k1 + tl.full(k1.shape, _W1, tl.uint32)
    return _bytes(c0, c1, COLUMNS) >= kept, _bytes(c2, c3, COLUMNS) >= kept


@triton.jit
def _bytes(left, right, COLUMNS: tl.constexpr):
    """Lay the bytes of two words [ROWS, COLUMNS / 8] beside each other."""
    word = tl.reshape(tl.join(left, right), (_ROWS, COLUMNS // 4))
    even = tl.join(word & 0xFF, (word >> 16) & 0xFF)
    odd = tl.join((word >> 8) & 0xFF, word >> 24)
    return tl.reshape(tl.join(even, odd), (_ROWS, COLUMNS))


@triton.jit
def _slice(number, LANES: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the adapter of one of COUNT * BLOCKS slices of LANES ranks, and which ranks it has."""
    return number // BLOCKS, (number % BLOCKS) * LANES + tl.arange(0, LANES)


@triton.jit
def _load(x, row, column, rows, columns, stride, WHOLE: tl.constexpr):
    inside = (row < rows) & (WHOLE | (column < columns))
    return tl.load(x + row.to(tl.int64) * stride + column, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["index", "least", "higher"])
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
    higher,
    RANK: tl.constexpr,
    TOTAL: tl.constexpr,
    LANES: tl.constexpr,
    BLOCKS: tl.constexpr,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Project two tiles of rows by a slice of one adapter, over PART columns of x."""
    pair, part = tl.program_id(0), tl.program_id(1)
    adapter, rank = _slice(tl.program_id(2), LANES, BLOCKS)
    lane = tl.arange(0, _ROWS)[:, None]
    row = pair * (2 * _ROWS) + lane
    upper = tl.zeros((_ROWS, LANES), tl.float32)
    lower = tl.zeros((_ROWS, LANES), tl.float32)
    for start in range(0, PART, COLUMNS):
        column = part * PART + start + tl.arange(0, COLUMNS)
        call = (part * PART + start) // 8 + tl.arange(0, COLUMNS // 8)[None, :]
        weight = tl.load(
            a + (adapter * RANK + rank[None, :]) * columns + column[:, None],
            mask=(rank[None, :] < RANK) & (WHOLE | (column[:, None] < columns)),
            other=0.0,
        )
        column = column[None, :]
        keep_upper, keep_lower = _keep(
            pair * _ROWS + lane, call, adapter, seeds, index, least, higher, COLUMNS
        )
        value = _load(x, row, column, rows, columns, stride, WHOLE)
        value = tl.where(keep_upper, value, 0.0)
        upper = tl.dot(value, weight, upper, input_precision="ieee")
        value = _load(x, row + _ROWS, column, rows, columns, stride, WHOLE)
        value = tl.where(keep_lower, value, 0.0)
        lower = tl.dot(value, weight, lower, input_precision="ieee")
    to = partial + (part.to(tl.int64) * rows + row) * TOTAL + adapter * RANK + rank[None, :]
    inside = rank[None, :] < RANK
    tl.store(to, upper, mask=inside & (row < rows))
    tl.store(to + _ROWS * TOTAL, lower, mask=inside & (row + _ROWS < rows))


@triton.jit
def _low(of_low, row, rank, rows, stride, RANK: tl.constexpr):
    return tl.load(
        of_low + row.to(tl.int64) * stride + rank[None, :],
        mask=(row < rows) & (rank[None, :] < RANK),
        other=0.0,
    )


@triton.jit(do_not_specialize=["index", "least", "higher"])
def grad_a(
    x,
    seeds,
    of_low,
    partial,
    rows,
    columns,
    stride,
    low_stride,
    index,
    least,
    higher,
    RANK: tl.constexpr,
    TOTAL: tl.constexpr,
    LANES: tl.constexpr,
    BLOCKS: tl.constexpr,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The gradient of a slice of one adapter's A in COLUMNS columns, over PART rows of x."""
    block, part = tl.program_id(0), tl.program_id(1)
    adapter, rank = _slice(tl.program_id(2), LANES, BLOCKS)
    lane = tl.arange(0, _ROWS)[:, None]
    column = block * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    call = block * (COLUMNS // 8) + tl.arange(0, COLUMNS // 8)[None, :]
    of_low += adapter * RANK
    total = tl.zeros((LANES, COLUMNS), tl.float32)
    for start in range(0, PART, 2 * _ROWS):
        row = part * PART + start + lane
        keep_upper, keep_lower = _keep(
            (part * PART + start) // 2 + lane, call, adapter, seeds, index, least, higher, COLUMNS
        )
        value = _load(x, row, column, rows, columns, stride, WHOLE)
        value = tl.where(keep_upper, value, 0.0)
        low = tl.trans(_low(of_low, row, rank, rows, low_stride, RANK))
        total = tl.dot(low, value, total, input_precision="ieee")
        value = _load(x, row + _ROWS, column, rows, columns, stride, WHOLE)
        value = tl.where(keep_lower, value, 0.0)
        low = tl.trans(_low(of_low, row + _ROWS, rank, rows, low_stride, RANK))
        total = tl.dot(low, value, total, input_precision="ieee")
    to = partial + (part * TOTAL + adapter * RANK + rank[:, None]).to(tl.int64) * columns + column
    tl.store(to, total, mask=(rank[:, None] < RANK) & (WHOLE | (column < columns)))


@triton.jit
def _write(to, tile, inside, ADDS: tl.constexpr):
    """Write a tile, rounded once, also where what is there is added to it."""
    if ADDS:
        tile += tl.load(to, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, tile.to(to.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["index", "least", "higher"])
def grad_x(
    a,
    seeds,
    of_low,
    of_x,
    rows,
    columns,
    low_stride,
    index,
    least,
    higher,
    SCALE: tl.constexpr,
    COUNT: tl.constexpr,
    RANK: tl.constexpr,
    LANES: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    ADDS: tl.constexpr,
):
    """The gradient of two tiles of x: the sum over slices of adapters, each under its mask, and
    over what is in `of_x` where it ADDS."""
    block, pair = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, _ROWS)[:, None]
    row = pair * (2 * _ROWS) + lane
    column = block * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    call = block * (COLUMNS // 8) + tl.arange(0, COLUMNS // 8)[None, :]
    upper = tl.zeros((_ROWS, COLUMNS), tl.float32)
    lower = tl.zeros((_ROWS, COLUMNS), tl.float32)
    for number in range(COUNT * BLOCKS):
        adapter, rank = _slice(number, LANES, BLOCKS)
        keep_upper, keep_lower = _keep(
            pair * _ROWS + lane, call, adapter, seeds, index, least, higher, COLUMNS
        )
        weight = tl.load(
            a + (adapter * RANK + rank[:, None]) * columns + column,
            mask=(rank[:, None] < RANK) & (WHOLE | (column < columns)),
            other=0.0,
        )
        low = _low(of_low + adapter * RANK, row, rank, rows, low_stride, RANK)
        back = tl.dot(low, weight, input_precision="ieee")
        upper += tl.where(keep_upper, back, 0.0)
        low = _low(of_low + adapter * RANK, row + _ROWS, rank, rows, low_stride, RANK)
        back = tl.dot(low, weight, input_precision="ieee")
        lower += tl.where(keep_lower, back, 0.0)
    to = of_x + row.to(tl.int64) * columns + column
    inside = WHOLE | (column < columns)
    _write(to, upper * SCALE, inside & (row < rows), ADDS)
    _write(to + _ROWS * columns, lower * SCALE, inside & (row + _ROWS < rows), ADDS)


@triton.jit(do_not_specialize=["parts"])
def finish(
    partial,
    out,
    parts,
    rows,
    columns,
    width,
    stride,
    SCALE: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up the parts in their order; columns behind the parts' become zero."""
    row = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    source = partial + row.to(tl.int64) * columns + column
    total = tl.zeros((HEIGHT, BLOCK), tl.float32)
    for _ in range(parts):
        total += tl.load(source, mask=inside, other=0.0)
        source += rows * columns
    to = out + row.to(tl.int64) * stride + column
    tl.store(to, (total * SCALE).to(out.dtype.element_ty), mask=(row < rows) & (column < width))
