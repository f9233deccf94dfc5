"""A product of few ranks added to a matrix in place on a GPU, at the speed of memory.

A program has a tile of the matrix: it reads it once, multiplies all ranks of its rows and columns
on tensor cores, and writes the sum. A factor of the product is a constant of the kernel, as it is
one of the model. cuBLAS takes longer for that than a copy of the matrix.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from inductor_q.kernels.calls import AddProduct
from inductor_q.kernels.dequantize_triton import INT32_LIMIT
from inductor_q.kernels.gpu import MOST_TILES, few_ranks, lanes
from inductor_q.kernels.provider import TritonProvider
from inductor_q.kernels.triton_launch import Repeated

#: The most ranks that a program takes. It was measured with up to 48, on an H100, where it is as
#: fast as a copy of the matrix.
MOST = 64
ROWS, COLUMNS = 64, 128  # of a tile
WARPS = 4


class Triton(TritonProvider[AddProduct]):
    def refuses(self, call: AddProduct) -> str:
        base, a, b = call.base, call.a, call.b
        if refused := few_ranks((base, a, b), a.shape[1], MOST):
            return refused
        if not base.is_contiguous() or a.stride(1) != 1 or 1 not in b.stride():
            return "the sum is not contiguous, or the numbers of a row lie apart"
        if max(b.stride()) * max(b.shape) >= INT32_LIMIT:
            return "offsets into b do not fit 32 bits"
        if base.shape[0] > MOST_TILES * ROWS:
            return f"a launch has at most {MOST_TILES} tiles of {ROWS} rows"
        return ""

    def plan(self, call: AddProduct) -> Callable[[AddProduct], None]:
        import triton

        (rows, columns), inner = call.base.shape, call.a.shape[1]
        by_columns = call.b.stride(1) != 1  # as B' of an adapter's B [N, K] lies in memory
        launch = Repeated(
            _kernel(),
            (triton.cdiv(columns, COLUMNS), triton.cdiv(rows, ROWS), 1),
            (rows, columns, inner, call.a.stride(0), call.b.stride(1 if by_columns else 0)),
            {
                "BY_COLUMNS": by_columns,
                "ROWS": ROWS,
                "COLUMNS": COLUMNS,
                "RANK": lanes(inner),
                "ALPHA": call.alpha,
            },
            num_warps=WARPS,
        )
        return lambda call: launch((call.base, call.a, call.b))


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["rows", "inner"])
    def add_product(
        base,
        a,
        b,
        rows,
        columns,
        inner,
        stride_a,
        stride_b,
        BY_COLUMNS: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        RANK: tl.constexpr,
        ALPHA: tl.constexpr,
    ):
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        rank = tl.arange(0, RANK)
        is_row, is_column, is_rank = row < rows, column < columns, rank < inner
        place = base + row[:, None].to(tl.int64) * columns + column[None, :]
        inside = is_row[:, None] & is_column[None, :]
        old = tl.load(place, mask=inside, other=0.0)
        left = tl.load(
            a + row[:, None].to(tl.int64) * stride_a + rank[None, :],
            mask=is_row[:, None] & is_rank[None, :],
            other=0.0,
        )
        if BY_COLUMNS:
            of_right = column[None, :] * stride_b + rank[:, None]
        else:
            of_right = rank[:, None] * stride_b + column[None, :]
        right = tl.load(b + of_right, mask=is_rank[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(left, right) * ALPHA + old.to(tl.float32)
        tl.store(place, total.to(old.dtype), mask=inside)

    return add_product


KERNEL = Triton()
