"""Write a weight in eight bits on a GPU with one Triton launch, transposed or not.

A program decodes a tile of rows and of their words, as `dequantize_triton` does, multiplies each
row with the reciprocal of its scale and rounds. A transposed tile goes through shared memory, so
that what is stored is contiguous; `pitch` is the stride of its rows. The printed parts are those of
`dequantize_triton`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from inductor_q.formats import QuantFormat
from inductor_q.kernels.calls import Requantize
from inductor_q.kernels.dequantize_triton import (
    Kernel,
    codebook_on,
    codes_of_a_lane,
    print_kernel,
)
from inductor_q.kernels.provider import TritonProvider
from inductor_q.kernels.triton_launch import Repeated

INT32_LIMIT = 2**31


@dataclass(frozen=True)
class Config:
    """Rows and columns of a tile, and warps per program."""

    rows: int
    columns: int
    num_warps: int


# The fastest of forty each on an H200, for nf4, nested, and four shapes.
PLAIN = Config(rows=1, columns=1024, num_warps=4)
TRANSPOSED = Config(rows=256, columns=32, num_warps=4)

_KERNEL = """
@triton.jit
def requantize(out, qweight, codebook, row_scale, {pointers}rows, cols, words, pitch,
               ROWS: tl.constexpr, UNITS: tl.constexpr, TRANSPOSED: tl.constexpr,
               WIDE: tl.constexpr):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * UNITS * {codes} + tl.arange(0, UNITS * {codes})
    word = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    of_row = 1.0 / tl.load(row_scale + row, mask=row < rows, other=1.0)
    if WIDE:
        row = row.to(tl.int64)
        column = column.to(tl.int64)
    u = row[:, None] * words + word[None, :]
    mask = (row < rows)[:, None] & (word < words)[None, :]
    packed = qweight.to(tl.pointer_type({unit}))  # whatever dtype the bytes are stored in
{units}
    i = u * {codes}
{values}
    x = tl.reshape({joined}, [ROWS, UNITS * {codes}]) * of_row[:, None]
    if out.dtype.element_ty == tl.int8:
        x = (x + 12582912.0) - 12582912.0  # drops the fraction, rounded to even
    x = x.to(out.dtype.element_ty)
    if TRANSPOSED:
        place = column[:, None] * pitch + row[None, :]
        keep = (column < cols)[:, None] & (row < rows)[None, :]
        tl.store(out + place, tl.trans(x), mask=keep)
    else:
        place = row[:, None] * cols + column[None, :]
        keep = (row < rows)[:, None] & (column < cols)[None, :]
        tl.store(out + place, x, mask=keep)
"""


class Triton(TritonProvider[Requantize]):
    def refuses(self, call: Requantize) -> str:
        return call.scattered()

    def plan(self, call: Requantize) -> Plan:
        return Plan(call)


class Plan:
    """A launch for all calls that are like the first one."""

    def __init__(self, call: Requantize, config: Config | None = None) -> None:
        fmt, out = call.fmt, call.out.t() if call.transposed else call.out
        config = config or (TRANSPOSED if call.transposed else PLAIN)
        rows, columns = out.shape
        codes = codes_of_a_lane(call.operands[0], fmt, out, True, columns)
        codes = 1 if columns % codes else codes
        extent = max(rows * columns, call.out.shape[0] * call.out.stride(0))
        kernel = _kernel(fmt, codes)
        self._codebook = codebook_on(fmt, out.device)
        self._order = kernel.order(fmt)
        self._launch = Repeated(
            kernel.function,
            (-(-columns // config.columns), -(-rows // config.rows), 1),
            (rows, columns, columns // codes, call.out.stride(0)),
            {
                "ROWS": config.rows,
                "UNITS": config.columns // codes,
                "TRANSPOSED": call.transposed,
                "WIDE": extent + config.rows * config.columns >= INT32_LIMIT,
            },
            num_warps=config.num_warps,
            enable_fp_fusion=False,
        )

    def __call__(self, call: Requantize) -> None:
        first, *others = [(*call.operands, self._codebook)[i] for i in self._order]
        self._launch([call.out, first, others[0], call.scale, *others[1:]])


@functools.cache
def _kernel(fmt: QuantFormat, codes: int) -> Kernel:
    """Print and compile the kernel of `fmt` for `codes` codes in a lane."""
    return print_kernel("requantize", _KERNEL, fmt, codes, "")


KERNEL = Triton()
