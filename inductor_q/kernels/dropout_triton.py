"""Products of adapters under dropout on a GPU: masks are made in registers, where they are used.

Both kernels split what they add up over programs, so that the random numbers, which cost more than
the memory traffic, are made on all of the device. A second launch adds the parts in a fixed order.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from inductor_q.kernels.calls import DropoutGrad, DropoutProject
from inductor_q.kernels.dropout import CALL_ROWS, threshold
from inductor_q.kernels.gpu import on, unfit
from inductor_q.kernels.provider import Provider

MAX_RANK = 128
#: Columns of a tile, and how many columns (rows) of the input a program adds up.
COLUMNS = 128
PROJECT_PART = 512
GRAD_PART = 512
WARPS = 4
STAGES = 2


class _Triton:
    name = "triton"

    def missing(self) -> str:
        return "" if importlib.util.find_spec("triton") else "triton is not installed"

    def unknown(self, fmt: object) -> str:
        return ""


class Project(_Triton, Provider[DropoutProject]):
    def refuses(self, call: DropoutProject) -> str:
        return _refuses(call) or unfit(call.out)

    def run(self, call: DropoutProject) -> Tensor:
        import triton

        from inductor_q.kernels.dropout_kernels_triton import project

        rows, columns = call.x.shape
        total = call.a.shape[0]
        parts = triton.cdiv(columns, PROJECT_PART)
        a = call.a.contiguous()
        partial = call.x.new_empty((parts, rows, total), dtype=torch.float32)
        with on(call.device):
            project[(triton.cdiv(rows, CALL_ROWS), parts, call.count)](
                call.x,
                a,
                call.seeds,
                partial,
                rows,
                columns,
                call.x.stride(0),
                call.index,
                *threshold(call.p),
                RANK=total // call.count,
                TOTAL=total,
                LANES=_lanes(total // call.count),
                PART=PROJECT_PART,
                COLUMNS=COLUMNS,
                WHOLE=columns % COLUMNS == 0,
                num_warps=WARPS,
                num_stages=STAGES,
            )
            _finish(partial, call.out, 1 / (1 - call.p))
        return call.out


class Grad(_Triton, Provider[DropoutGrad]):
    def refuses(self, call: DropoutGrad) -> str:
        return _refuses(call)

    def run(self, call: DropoutGrad) -> tuple[Tensor, Tensor]:
        import triton

        from inductor_q.kernels.dropout_kernels_triton import grad_a, grad_x

        rows, columns = call.x.shape
        total = call.a.shape[0]
        rank, scale = total // call.count, 1 / (1 - call.p)
        parts = triton.cdiv(rows, GRAD_PART)
        blocks = triton.cdiv(columns, COLUMNS)
        a = call.a.contiguous()
        partial = call.x.new_empty((parts, total, columns), dtype=torch.float32)
        of_a, of_x = torch.empty_like(a), call.x.new_empty((rows, columns))
        numbers = (call.index, *threshold(call.p))
        with on(call.device):
            grad_a[(blocks, parts, call.count)](
                call.x,
                call.seeds,
                call.grad,
                partial,
                rows,
                columns,
                call.x.stride(0),
                call.grad.stride(0),
                *numbers,
                RANK=rank,
                TOTAL=total,
                LANES=_lanes(rank),
                PART=GRAD_PART,
                COLUMNS=COLUMNS,
                WHOLE=columns % COLUMNS == 0,
                num_warps=WARPS,
                num_stages=STAGES,
            )
            _finish(partial, of_a, scale)
            grad_x[(blocks, triton.cdiv(rows, CALL_ROWS))](
                a,
                call.seeds,
                call.grad,
                of_x,
                rows,
                columns,
                call.grad.stride(0),
                *numbers,
                scale,
                COUNT=call.count,
                RANK=rank,
                LANES=_lanes(rank),
                COLUMNS=COLUMNS,
                WHOLE=columns % COLUMNS == 0,
                num_warps=WARPS,
                num_stages=STAGES,
            )
        return of_a, of_x


def _refuses(call: DropoutProject | DropoutGrad) -> str:
    if call.x.stride(1) != 1:
        return "the input is not a matrix with unit column stride"
    if isinstance(call, DropoutGrad) and call.grad.stride(1) != 1:
        return "the gradient is not a matrix with unit column stride"
    if call.a.shape[0] // call.count > MAX_RANK:
        return f"the rank is larger than {MAX_RANK}"
    return ""


def _lanes(rank: int) -> int:
    """The rank as a size of a tile that tensor cores take."""
    import triton

    return max(16, int(triton.next_power_of_2(rank)))


def _finish(partial: Tensor, out: Tensor, scale: float) -> None:
    """Add up the parts, scale the sum, and write it to the first columns of `out`."""
    import triton

    from inductor_q.kernels.dropout_kernels_triton import finish

    parts, rows, columns = partial.shape
    block = min(1024, int(triton.next_power_of_2(out.shape[1])))
    height = 1024 // block
    finish[(triton.cdiv(rows, height), triton.cdiv(out.shape[1], block))](
        partial,
        out,
        rows,
        columns,
        out.shape[1],
        out.stride(0),
        scale,
        PARTS=parts,
        HEIGHT=height,
        BLOCK=block,
        num_warps=WARPS,
        num_stages=STAGES,
    )


PROJECT = Project()
GRAD = Grad()
