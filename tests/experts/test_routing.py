"""Routing: a plan of fixed shape that every slot and every row is in exactly once."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.library import opcheck

from inductor_q import exc
from inductor_q.kernels.tile_map import height
from inductor_q.kernels.tile_map_reference import reference
from inductor_q.ops import routing as routing_module
from inductor_q.ops.routing import Routing, route
from inductor_q.ops.tile_map import tile_map

DRAWING = routing_module.__doc__ or ""

CASES = {
    "usual": (7, 2, 5),
    "no tokens": (0, 2, 5),
    "one token": (1, 2, 5),
    "every expert": (6, 4, 4),
    "one expert": (9, 1, 1),
    "many experts": (3, 8, 300),
}


def test_the_picture_in_the_documentation() -> None:
    """The numbers drawn in the docstring of ops/routing.py are what `route` computes."""
    routing = route(torch.tensor([[1, 0], [2, 1], [1, -1], [0, 1]]), 3)
    drawn = {
        name: [int(n) for n in numbers.split()]
        for name, numbers in re.findall(r"^ +(order|offsets) ((?: +\d)+) ", DRAWING, re.MULTILINE)
    }
    assert drawn == {"order": routing.order.tolist(), "offsets": routing.offsets.tolist()}


def choices(tokens: int, top_k: int, num_experts: int, seed: int = 0) -> Tensor:
    """`top_k` different experts a token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, num_experts, generator=generator).argsort(-1)[:, :top_k]


def check(routing: Routing, ids: Tensor, num_experts: int) -> None:
    order, offsets = routing.order.tolist(), routing.offsets.tolist()
    flat = ids.flatten().tolist()
    assert sorted(order) == list(range(len(flat)))
    assert routing.inverse[routing.order].tolist() == list(range(len(flat)))
    assert (offsets[0], len(offsets)) == (0, num_experts + 1)
    for e, (start, end) in enumerate(itertools.pairwise(offsets)):
        assert order[start:end] == [s for s, i in enumerate(flat) if i == e]
    assert order[offsets[-1] :] == [s for s, i in enumerate(flat) if not 0 <= i < num_experts]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_every_slot_in_its_experts_rows(case: str, dtype: torch.dtype) -> None:
    ids = choices(*CASES[case]).to(dtype)
    check(route(ids, CASES[case][2]), ids, CASES[case][2])


@pytest.mark.parametrize("sentinel", [-1, 4, 7])
def test_sentinels_come_last(sentinel: int) -> None:
    ids = choices(9, 3, 8)
    ids = torch.where(ids < 4, ids, sentinel)
    routing = route(ids, 4)
    check(routing, ids, 4)
    assert int(routing.offsets[-1]) == int((ids != sentinel).sum())


def parts_of(tiles: Tensor) -> list[list[int]]:
    """(expert, first row, rows) of each part of a tile map."""
    count = int(tiles[0, 0])
    assert (tiles[1 : 1 + count, 3] == 0).all()
    return tiles[1 : 1 + count, :3].tolist()


@pytest.mark.parametrize("sentinel", [False, True])
@pytest.mark.parametrize(
    "case", [*CASES.values(), (100, 2, 3), (400, 4, 8), (1, 1, 40), (600, 1, 1), (999, 3, 5)]
)
def test_tile_map_has_every_row_in_as_few_parts_as_hold_them(
    case: tuple[int, int, int], sentinel: bool
) -> None:
    """Of a height that is a multiple of what a matrix instruction takes."""
    tokens, top_k, num_experts = case
    ids = choices(*case)
    if sentinel:
        ids[::3] = -1
    routing = route(ids, num_experts)
    most = height(tokens * top_k, num_experts, ids.device)
    parts = parts_of(routing.tiles)
    offsets = routing.offsets.tolist()
    expected = []
    for e, (start, end) in enumerate(itertools.pairwise(offsets)):
        mine = [(first, rows) for expert, first, rows in parts if expert == e]
        assert len(mine) == -(-(end - start) // most)
        assert all(rows == mine[0][1] and rows % 16 == 0 for _, rows in mine[:-1])
        expected += [row for first, rows in mine for row in range(first, first + rows)]
    assert expected == list(range(offsets[-1]))
    assert [e for e, _, _ in parts] == sorted(e for e, _, _ in parts)


@pytest.mark.parametrize("experts", [1, 5])
def test_opcheck_tile_map(experts: int) -> None:
    offsets = route(choices(30, 1, experts), experts).offsets
    opcheck(torch.ops.qfuse.tile_map.default, (offsets, 30))


def test_offsets_beyond_the_rows_make_no_more_parts_than_there_is_room_for() -> None:
    tiles = tile_map(torch.tensor([0, 4000], dtype=torch.int32), 4)
    assert tiles.shape == (2, 4) and len(parts_of(tiles)) == 1


def test_tile_map_of_something_else() -> None:
    with pytest.raises(exc.WrongDtype, match=r"offsets of a routing is torch\.int64"):
        tile_map(torch.tensor([0, 3]), 3)
    with pytest.raises(exc.WrongShape, match="offsets of a routing"):
        tile_map(torch.tensor([0], dtype=torch.int32), 3)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES.values(), (4096, 8, 128), (64, 8, 128), (4096, 4, 32)])
def test_gpu_tile_map_is_the_reference_s(case: tuple[int, int, int]) -> None:
    tokens, top_k, num_experts = case
    routing = route(choices(*case).cuda(), num_experts)
    expected = reference(routing.offsets, tokens * top_k)
    assert parts_of(routing.tiles) == parts_of(expected)


def test_nothing_but_sentinels() -> None:
    routing = route(torch.full((3, 2), -1), 4)
    assert routing.offsets.tolist() == [0] * 5
    assert parts_of(routing.tiles) == []


def test_one_graph_for_every_number_of_tokens() -> None:
    torch.compiler.reset()
    counters.clear()

    def plan(ids: Tensor) -> tuple[Tensor, ...]:
        routing = route(ids, 5)
        return routing.order, routing.inverse, routing.offsets, routing.tiles

    compiled = torch.compile(plan, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (7, 12, 33):
        ids = choices(tokens, 2, 5)
        for got, expected in zip(compiled(ids), plan(ids), strict=True):
            assert torch.equal(got, expected)
    assert counters["stats"]["unique_graphs"] == 1
