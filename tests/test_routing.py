"""Routing: a plan of fixed shape that every slot and every row is in exactly once."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from inductor_q.experts.routing import Routing, route

CASES = {
    "usual": (7, 2, 5),
    "no tokens": (0, 2, 5),
    "one token": (1, 2, 5),
    "every expert": (6, 4, 4),
    "one expert": (9, 1, 1),
    "many experts": (3, 8, 300),
}


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


def test_nothing_but_sentinels() -> None:
    routing = route(torch.full((3, 2), -1), 4)
    assert routing.offsets.tolist() == [0] * 5


def test_one_graph_for_every_number_of_tokens() -> None:
    torch.compiler.reset()
    counters.clear()

    def plan(ids: Tensor) -> tuple[Tensor, ...]:
        routing = route(ids, 5)
        return routing.order, routing.inverse, routing.offsets

    compiled = torch.compile(plan, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (7, 12, 33):
        ids = choices(tokens, 2, 5)
        for got, expected in zip(compiled(ids), plan(ids), strict=True):
            assert torch.equal(got, expected)
    assert counters["stats"]["unique_graphs"] == 1
