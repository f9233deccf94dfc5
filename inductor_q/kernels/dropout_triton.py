"""Products of adapters under dropout on a GPU: masks are made in registers, where they are used.

Kernels that add up rows or columns split them over programs, so that the random numbers, which
cost more than the memory traffic, are made on all of the device. A second launch adds the parts in
a fixed order.

A program has up to MAX_LANES ranks of an adapter. Larger ranks are slices of as many, each of which
makes the same mask again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inductor_q.kernels.dropout import CALL_ROWS, threshold
from inductor_q.kernels.dropout_calls import DropoutGradA, DropoutGradX, DropoutProject
from inductor_q.kernels.gpu import unfit
from inductor_q.kernels.provider import TritonProvider
from inductor_q.kernels.triton_launch import Repeated

#: The most ranks that a program has, a power of two.
MAX_LANES = 128
WARPS = 4
STAGES = 2


@dataclass(frozen=True)
class Tiles:
    """What a program computes: `columns` of a tile, and how many columns (rows) of the input it
    adds up."""

    columns: int
    part: int


#: Up to 64 ranks.
NARROW = Tiles(columns=128, part=512)
#: More of them, measured in whole steps alone (benchmarks.bench_families --only "Qwen3, r = 128").
#: A tile of A, [ranks, columns], and the accumulator of its gradient are as large as those of 64
#: ranks: compiled for sm_90, the kernels of three adapters of 128 ranks have no more registers than
#: those of 64, and with tiles of 128 columns `grad_x` would spill. Twice as much is added up, so
#: that parts, in float32, take as much memory as those of 64 ranks.
WIDE = Tiles(columns=64, part=1024)


class Project(TritonProvider[DropoutProject]):
    def refuses(self, call: DropoutProject) -> str:
        return _refuses(call.x) or unfit(call.out)

    def plan(self, call: DropoutProject) -> Callable[[DropoutProject], Tensor]:
        rows, columns = call.x.shape
        total = call.a.shape[0]
        tiles, ranks = _ranks(total, call.count)
        shape = (_blocks(columns, tiles.part), rows, total)
        project = _launch(
            "project",
            (_blocks(rows, CALL_ROWS), shape[0], call.count * ranks["BLOCKS"]),
            (rows, columns, call.x.stride(0), call.index, *threshold(call.p)),
            {**ranks, "PART": tiles.part, **_columns(tiles, columns, tiles.part)},
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
        return _refuses(call.x) or _refuses_grad(call.grad)

    def plan(self, call: DropoutGradA) -> Callable[[DropoutGradA], Tensor]:
        rows, columns = call.x.shape
        total = call.grad.shape[1]
        tiles, ranks = _ranks(total, call.count)
        shape = (_blocks(rows, tiles.part), total, columns)
        grad_a = _launch(
            "grad_a",
            (_blocks(columns, tiles.columns), shape[0], call.count * ranks["BLOCKS"]),
            (rows, columns, call.x.stride(0), call.grad.stride(0), call.index, *threshold(call.p)),
            {**ranks, "PART": tiles.part, **_columns(tiles, columns, tiles.columns)},
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
        if call.adds and not call.new().is_contiguous():
            return "the sum is not contiguous"
        return _refuses(call.a) or _refuses_grad(call.grad)

    def plan(self, call: DropoutGradX) -> Callable[[DropoutGradX], Tensor]:
        rows, (total, columns) = call.grad.shape[0], call.a.shape
        tiles, ranks = _ranks(total, call.count)
        del ranks["TOTAL"]
        constants = {"SCALE": 1 / (1 - call.p), "COUNT": call.count, **ranks}
        grad_x = _launch(
            "grad_x",
            (_blocks(columns, tiles.columns), _blocks(rows, CALL_ROWS), 1),
            (rows, columns, call.grad.stride(0), call.index, *threshold(call.p)),
            {**constants, **_columns(tiles, columns, tiles.columns), "ADDS": call.adds},
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


def _ranks(total: int, count: int) -> tuple[Tiles, dict[str, Any]]:
    """The tiles, the rank of an adapter and of all, the ranks of a program as a size for tensor
    cores, and how many of these an adapter has."""
    rank = total // count
    lanes = min(MAX_LANES, max(16, 1 << (rank - 1).bit_length()))
    tiles = NARROW if lanes <= 64 else WIDE
    return tiles, {"RANK": rank, "TOTAL": total, "LANES": lanes, "BLOCKS": _blocks(rank, lanes)}


def _columns(tiles: Tiles, columns: int, part: int) -> dict[str, Any]:
    """The width of a tile, and whether programs of `part` columns end where the input does."""
    return {"COLUMNS": tiles.columns, "WHOLE": columns % part == 0}


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


def _refuses(factor: Tensor) -> str:
    if factor.stride(1) != 1:
        return "a factor is not a matrix with unit column stride"
    if factor.dtype.itemsize != 2:
        return "products in float32 are more exact as the reference adds them up"
    return ""


def _refuses_grad(grad: Tensor) -> str:
    return "" if grad.stride(1) == 1 else "the gradient is not a matrix with unit column stride"


PROJECT = Project()
GRAD_A = GradA()
GRAD_X = GradX()
