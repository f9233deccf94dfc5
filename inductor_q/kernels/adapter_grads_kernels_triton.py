"""The Triton kernels of `adapter_grads_triton.py`: the products of tiles, and the sums of them."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def multiply(
    grad,
    p,
    b,
    parts_p,
    parts_b,
    rows,
    columns,
    stride_grad,
    stride_p,
    stride_b,
    RANK: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    stripe, part = tl.program_id(0), tl.program_id(1)
    column = stripe * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, LANES)
    is_column, is_rank = column < columns, lane < RANK
    right = tl.load(
        b + column[:, None].to(tl.int64) * stride_b + lane[None, :],
        mask=is_column[:, None] & is_rank[None, :],
        other=0.0,
    )
    total = tl.zeros([COLUMNS, LANES], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        row = (part * STEPS + step) * ROWS + tl.arange(0, ROWS)
        is_row, long = row < rows, row[:, None].to(tl.int64)
        tile = tl.load(
            grad + long * stride_grad + column[None, :],
            mask=is_row[:, None] & is_column[None, :],
            other=0.0,
        )
        left = tl.load(
            p + long * stride_p + lane[None, :],
            mask=is_row[:, None] & is_rank[None, :],
            other=0.0,
        )
        place = parts_p + (stripe.to(tl.int64) * rows + row[:, None]) * LANES + lane[None, :]
        tl.store(place, tl.dot(tile, right), mask=is_row[:, None])
        total = tl.dot(tl.trans(tile), left, total)
    place = parts_b + (part.to(tl.int64) * columns + column[:, None]) * LANES + lane[None, :]
    tl.store(place, total, mask=is_column[:, None])


@triton.jit
def add_up(
    parts,
    out,
    count,
    rows,
    stride,
    first,
    FACTOR: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    SPREAD: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write rows of WIDTH numbers, of which those behind the rank are zeros."""
    i = first + tl.arange(0, BLOCK)  # of the numbers of all rows, SPREAD to a row
    row, lane = i // SPREAD, i % SPREAD
    total = tl.zeros([BLOCK], tl.float32)
    place = parts + row * LANES + lane
    for _ in range(count):
        total += tl.load(place, mask=(row < rows) & (lane < RANK), other=0.0)
        place += rows * LANES
    place = out + row.to(tl.int64) * stride + lane
    value = (FACTOR * total).to(out.dtype.element_ty)
    tl.store(place, value, mask=(row < rows) & (lane < WIDTH))


@triton.jit(
    do_not_specialize=["rows", "columns", "stripes", "parts", "programs", "stride_p", "stride_b"]
)
def finish(
    parts_p,
    parts_b,
    of_p,
    of_b,
    rows,
    columns,
    stripes,
    parts,
    programs,
    stride_p,
    stride_b,
    RANK: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    SPREAD: tl.constexpr,
    FACTOR_P: tl.constexpr,
    FACTOR_B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    if program < programs:
        first = program * BLOCK
        add_up(
            parts_p,
            of_p,
            stripes,
            rows,
            stride_p,
            first,
            FACTOR_P,
            RANK,
            WIDTH,
            SPREAD,
            LANES,
            BLOCK,
        )
    else:
        first = (program - programs) * BLOCK
        add_up(
            parts_b,
            of_b,
            parts,
            columns,
            stride_b,
            first,
            FACTOR_B,
            RANK,
            RANK,
            LANES,
            LANES,
            BLOCK,
        )
