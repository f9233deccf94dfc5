"""Products of adapters under dropout on a GPU: masks are made in registers, where they are used.

Kernels that add up rows or columns split them over programs, so that the random numbers, which
cost more than the memory traffic, are made on all of the device. A second launch adds the parts in
a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inductor_q.kernels.calls import DropoutGradA, DropoutGradX, DropoutProject
from inductor_q.kernels.dropout import CALL_ROWS, threshold
from inductor_q.kernels.gpu import unfit
from inductor_q.kernels.provider import TritonProvider
from inductor_q.kernels.triton_launch import Repeated

#: Larger ranks have not run on a GPU.
MAX_RANK = 64
#: Columns of a tile, and how many columns (rows) of the input a program adds up.
COLUMNS = 128
PROJECT_PART = 512
GRAD_PART = 512
WARPS = 4
STAGES = 2


class Project(TritonProvider[DropoutProject]):
    def refuses(self, call: DropoutProject) -> str:
        return _refuses(call.x, call.a.shape[0] // call.count) or unfit(call.out)

    def plan(self, call: DropoutProject) -> Callable[[DropoutProject], Tensor]:
        rows, columns = call.x.shape
        total = call.a.shape[0]
        shape = (_blocks(columns, PROJECT_PART), rows, total)
        project = _launch(
            "project",
            (_blocks(rows, CALL_ROWS), shape[0], call.count),
            (rows, columns, call.x.stride(0), call.index, *threshold(call.p)),
            {**_ranks(total, call.count), "PART": PROJECT_PART, **_columns(columns, PROJECT_PART)},
        )
        finish = _finish(shape, call.out.shape[1], call.out.stride(0), 1 / (1 - call.p))

        def serve(call: DropoutProject) -> Tensor:
            partial = call.x.new_empty(shape, dtype=torch.float32)
            project((call.x, call.a.contiguous(), call.seeds, partial))
            finish((partial, call.out))
            return call.out

        return serve


class GradA(TritonProvider[DropoutGradA]):
    def refuses(self, call: DropoutGradA) -> str:
        return _refuses(call.x, call.grad.shape[1] // call.count) or _refuses_grad(call.grad)

    def plan(self, call: DropoutGradA) -> Callable[[DropoutGradA], Tensor]:
        rows, columns = call.x.shape
        total = call.grad.shape[1]
        shape = (_blocks(rows, GRAD_PART), total, columns)
        grad_a = _launch(
            "grad_a",
            (_blocks(columns, COLUMNS), shape[0], call.count),
            (rows, columns, call.x.stride(0), call.grad.stride(0), call.index, *threshold(call.p)),
            {**_ranks(total, call.count), "PART": GRAD_PART, **_columns(columns)},
        )
        finish = _finish(shape, columns, columns, 1 / (1 - call.p))

        def serve(call: DropoutGradA) -> Tensor:
            of_a = call.new()
            partial = call.x.new_empty(shape, dtype=torch.float32)
            grad_a((call.x, call.seeds, call.grad, partial))
            finish((partial, of_a))
            return of_a

        return serve


class GradX(TritonProvider[DropoutGradX]):
    def refuses(self, call: DropoutGradX) -> str:
        return _refuses(call.a, call.a.shape[0] // call.count) or _refuses_grad(call.grad)

    def plan(self, call: DropoutGradX) -> Callable[[DropoutGradX], Tensor]:
        rows, (total, columns) = call.grad.shape[0], call.a.shape
        constants = {"SCALE": 1 / (1 - call.p), "COUNT": call.count, **_ranks(total, call.count)}
        del constants["TOTAL"]
        grad_x = _launch(
            "grad_x",
            (_blocks(columns, COLUMNS), _blocks(rows, CALL_ROWS), 1),
            (rows, columns, call.grad.stride(0), call.index, *threshold(call.p)),
            {**constants, **_columns(columns)},
        )

        def serve(call: DropoutGradX) -> Tensor:
            of_x = call.new()
            grad_x((call.a.contiguous(), call.seeds, call.grad, of_x))
            return of_x

        return serve


def _finish(shape: tuple[int, int, int], width: int, stride: int, scale: float) -> Repeated:
    """Add up parts of a shape, scale the sum, and write it to the first columns of a matrix."""
    block = min(1024, 1 << (width - 1).bit_length())
    height = 1024 // block
    return _launch(
        "finish",
        (_blocks(shape[1], height), _blocks(width, block), 1),
        (*shape, width, stride),
        {"SCALE": scale, "HEIGHT": height, "BLOCK": block},
    )


def _ranks(total: int, count: int) -> dict[str, Any]:
    """The rank of an adapter and of all, and the rank as a size of tiles for tensor cores."""
    rank = total // count
    return {"RANK": rank, "TOTAL": total, "LANES": max(16, 1 << (rank - 1).bit_length())}


def _columns(columns: int, part: int = COLUMNS) -> dict[str, Any]:
    """The width of a tile, and whether programs of `part` columns end where the input does."""
    return {"COLUMNS": COLUMNS, "WHOLE": columns % part == 0}


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _launch(
    kernel: str,
    grid: tuple[int, int, int],
    numbers: tuple[int, ...],
    constants: dict[str, Any],
) -> Repeated:
    from inductor_q.kernels import dropout_kernels_triton

    function = getattr(dropout_kernels_triton, kernel)
    return Repeated(function, grid, numbers, constants, num_warps=WARPS, num_stages=STAGES)


def _refuses(factor: Tensor, rank: int) -> str:
    if factor.stride(1) != 1:
        return "a factor is not a matrix with unit column stride"
    if rank > MAX_RANK:
        return f"the rank is larger than {MAX_RANK}"
    if factor.dtype.itemsize != 2:
        return "products in float32 are more exact as the reference adds them up"
    return ""


def _refuses_grad(grad: Tensor) -> str:
    return "" if grad.stride(1) == 1 else "the gradient is not a matrix with unit column stride"


PROJECT = Project()
GRAD_A = GradA()
GRAD_X = GradX()
