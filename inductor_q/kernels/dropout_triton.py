"""Products of adapters under dropout on a GPU: masks are made in registers, where they are used.

Kernels that add up rows or columns split them over programs, so that the random numbers, which
cost more than the memory traffic, are made on all of the device. A second launch adds the parts in
a fixed order.
"""

from __future__ import annotations

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
#: How many launches are remembered; beyond that all are forgotten, and come back.
KEPT = 4096


class Project(TritonProvider[DropoutProject]):
    def refuses(self, call: DropoutProject) -> str:
        return _refuses(call.x, call.a.shape[0] // call.count) or unfit(call.out)

    def run(self, call: DropoutProject) -> Tensor:
        rows, columns = call.x.shape
        total = call.a.shape[0]
        parts = _blocks(columns, PROJECT_PART)
        partial = call.x.new_empty((parts, rows, total), dtype=torch.float32)
        _launch(
            "project",
            (call.x, call.a.contiguous(), call.seeds, partial),
            (_blocks(rows, CALL_ROWS), parts, call.count),
            (rows, columns, call.x.stride(0), call.index, *threshold(call.p)),
            {**_ranks(total, call.count), "PART": PROJECT_PART, **_columns(columns, PROJECT_PART)},
        )
        _finish(partial, call.out, 1 / (1 - call.p))
        return call.out


class GradA(TritonProvider[DropoutGradA]):
    def refuses(self, call: DropoutGradA) -> str:
        return _refuses(call.x, call.grad.shape[1] // call.count) or _refuses_grad(call.grad)

    def run(self, call: DropoutGradA) -> Tensor:
        rows, columns = call.x.shape
        of_a = call.new()
        parts = _blocks(rows, GRAD_PART)
        partial = call.x.new_empty((parts, *of_a.shape), dtype=torch.float32)
        _launch(
            "grad_a",
            (call.x, call.seeds, call.grad, partial),
            (_blocks(columns, COLUMNS), parts, call.count),
            (rows, columns, call.x.stride(0), call.grad.stride(0), call.index, *threshold(call.p)),
            {**_ranks(len(of_a), call.count), "PART": GRAD_PART, **_columns(columns)},
        )
        _finish(partial, of_a, 1 / (1 - call.p))
        return of_a


class GradX(TritonProvider[DropoutGradX]):
    def refuses(self, call: DropoutGradX) -> str:
        return _refuses(call.a, call.a.shape[0] // call.count) or _refuses_grad(call.grad)

    def run(self, call: DropoutGradX) -> Tensor:
        of_x, a = call.new(), call.a.contiguous()
        rows, columns = of_x.shape
        constants = {"SCALE": 1 / (1 - call.p), "COUNT": call.count, **_ranks(len(a), call.count)}
        del constants["TOTAL"]
        _launch(
            "grad_x",
            (a, call.seeds, call.grad, of_x),
            (_blocks(columns, COLUMNS), _blocks(rows, CALL_ROWS), 1),
            (rows, columns, call.grad.stride(0), call.index, *threshold(call.p)),
            {**constants, **_columns(columns)},
        )
        return of_x


def _finish(partial: Tensor, out: Tensor, scale: float) -> None:
    """Add up the parts, scale the sum, and write it to the first columns of `out`."""
    parts, rows, columns = partial.shape
    width = out.shape[1]
    block = min(1024, 1 << (width - 1).bit_length())
    height = 1024 // block
    _launch(
        "finish",
        (partial, out),
        (_blocks(rows, height), _blocks(width, block), 1),
        (parts, rows, columns, width, out.stride(0)),
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
    tensors: tuple[Tensor, ...],
    grid: tuple[int, int, int],
    numbers: tuple[int, ...],
    constants: dict[str, Any],
) -> None:
    """Launch a kernel as before, where a launch of it differed in nothing but its pointers."""
    like = tuple([(tensor.dtype, tensor.data_ptr() % 16) for tensor in tensors])
    key = (kernel, tensors[0].device, grid, numbers, tuple(constants.values()), like, WARPS, STAGES)
    launch = _LAUNCHES.get(key)
    if launch is None:
        from inductor_q.kernels import dropout_kernels_triton

        if len(_LAUNCHES) >= KEPT:
            _LAUNCHES.clear()
        function = getattr(dropout_kernels_triton, kernel)
        launch = _LAUNCHES[key] = Repeated(
            function, grid, numbers, constants, num_warps=WARPS, num_stages=STAGES
        )
    launch(tensors)


_LAUNCHES: dict[tuple[Any, ...], Repeated] = {}


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
