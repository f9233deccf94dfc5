"""The active experts of a routing: their numbers, the routing over them alone, their adapters."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from inductor_q import exc
from inductor_q.experts.packing import expert_shape
from inductor_q.kernels.expert_active import active_experts, select_adapter
from inductor_q.ops.routing import route
from tests.support.moe import Sizes, choices
from tests.support.quantized import assert_same_bits

CASES = {
    "few rows": (Sizes(experts=64, tokens=3, top_k=2), None),
    "many rows": (Sizes(experts=8, tokens=9, top_k=2), None),
    "one row": (Sizes(experts=8, tokens=1, top_k=1), None),
    "all experts": (Sizes(experts=4, tokens=5, top_k=4), None),
    "no expert here": (Sizes(experts=4, tokens=1, top_k=1), -1),
    "elsewhere": (Sizes(experts=8, tokens=3, top_k=2), 8),
}


@pytest.mark.parametrize("case", CASES)
def test_active_experts(case: str) -> None:
    sizes, sentinel = CASES[case]
    ids, e = choices(sizes, sentinel=sentinel), sizes.experts
    routing = route(ids, e)
    active = active_experts(routing.offsets, ids.numel())
    assert active.ids.shape == (min(e, ids.numel()),)
    chosen = sorted({i for i in ids.flatten().tolist() if 0 <= i < e})
    assert active.ids[: len(chosen)].tolist() == chosen
    assert len(set(active.ids.tolist())) == len(active.ids)  # room is left to others without rows
    # The same rows in the same order, as if there were no other experts.
    places = {number: place for place, number in enumerate(active.ids.tolist())}
    there = torch.tensor([places[i] if i in chosen else -1 for i in ids.flatten().tolist()])
    alone = route(there.view_as(ids), len(active.ids))
    assert torch.equal(alone.order, routing.order)
    assert torch.equal(alone.inverse, routing.inverse)
    assert torch.equal(alone.offsets, active.offsets)


def test_those_with_rows_come_first() -> None:
    ids = torch.tensor([[7, 2], [2, -1], [9, 4]])
    active = active_experts(route(ids, 9).offsets, ids.numel())
    assert active.ids.tolist() == [2, 4, 7, 0, 1, 3]
    assert active.offsets.tolist() == [0, 2, 3, 4, 4, 4, 4]


def test_nothing_depends_on_data() -> None:
    """Fake tensors have none, so a wait for the device would be an error."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        ids = torch.empty(3, 2, dtype=torch.int64)
        active = active_experts(route(ids, 9).offsets, 6)
        assert active.ids.shape == (6,) and active.offsets.shape == (7,)
        assert active.offsets.dtype is torch.int32


def test_adapters_of_some_experts() -> None:
    e, r, n, k = 5, 3, 4, 2
    a, b, some = torch.randn(e, r, k), torch.randn(e, n, r), torch.tensor([3, 0])
    a_some, b_some = select_adapter(a, b, some)
    assert_same_bits(a_some, torch.stack([a[3], a[0]]))
    assert_same_bits(b_some, torch.stack([b[3], b[0]]))


@pytest.mark.parametrize("shape", [(6, 4, 8), (24, 8)], ids=str)
def test_shape_of_a_stack(shape: Sequence[int]) -> None:
    assert expert_shape(shape, 6) == [6, 4, 8]


@pytest.mark.parametrize("shape", [(5, 4, 8), (25, 8), (24,), (6, 2, 2, 8)], ids=str)
def test_what_is_no_stack(shape: Sequence[int]) -> None:
    with pytest.raises(exc.WrongShape, match="6 rows"):
        expert_shape(shape, 6)
