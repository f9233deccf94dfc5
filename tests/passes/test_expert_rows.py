"""fuse_scatter2scatter: rows of experts go where the graph shows whose they are, and no other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.compiling import compile_step, op_name, step
from tests.support.expert_layers import (
    BY_TOKEN,
    PASS,
    TO_ROWS,
    TO_TOKENS,
    Experts,
    check_errors,
    in_float64,
    inputs,
    products,
)
from tests.support.moe_models import EXPERTS

Order = tuple[Tensor, Tensor]  # of sorted slots: the expert of each, and which it is


def grouped_mm(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Torch's, which has no float64: there, a loop over the groups."""
    if rows.dtype is not torch.float64:
        return torch._grouped_mm(rows, weight, offs=offs)
    spans = itertools.pairwise([0, *offs.tolist()])
    return torch.cat([rows[start:end] @ weight[e] for e, (start, end) in enumerate(spans)])


class First(Experts):
    """The first product alone, of rows and with a result that a test chooses."""

    def __init__(
        self,
        rows: Callable[[Tensor, Order], Tensor],
        result: Callable[[Tensor, Tensor, Order], Tensor] = lambda y, gates, order: y,
    ) -> None:
        super().__init__("qwen3_moe", "grouped_mm", torch.bfloat16)
        self.rows, self.result = rows, result

    def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        keys, order = torch.sort(ids.reshape(-1))
        counts = torch.histc(keys.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        offs = counts.cumsum(0, dtype=torch.int32)
        weight = self.experts.gate_up_proj.transpose(1, 2)
        y = grouped_mm(self.rows(x, (keys, order)), weight, offs)
        return self.result(y, gates, (keys, order))


def masked(keys: Tensor, first: int) -> Tensor:
    return (keys >= first).unsqueeze(-1)


def check_first(
    layer: First, *, found: list[Any], reasons: dict[str, int], numerics: str = "default"
) -> None:
    args = inputs(torch.bfloat16)
    options = {"qfuse.numerics": numerics}
    result = compile_step(layer, *args, fullgraph=True, options=options)
    check_errors(result, step(layer, *args), in_float64(layer, args))
    assert result.applied[PASS] == 2 and products(result) == found
    told = {f"rows stay sorted: {reason}": count for reason, count in reasons.items()}
    assert result.reasons.get(PASS, {}) == told


NOT_DIVIDED = "their tokens are not slots divided by top_k"
NOT_SORTED = "their order is not that of a sort"
NOT_NOBODYS = "some are masked that may be an expert's"


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (lambda x, order: x[order[1] // 2], ""),
        (lambda x, order: x[order[1] // 2].masked_fill(masked(order[0], 4), 0), ""),
        (lambda x, order: x.float()[order[1] // 2].to(x.dtype), ""),
        (lambda x, order: x.float().exp()[order[1] // 2].to(x.dtype), ""),
        (lambda x, order: x[order[1] % 7], NOT_DIVIDED),
        (lambda x, order: x[order[1].flip(0) // 2], NOT_SORTED),
        (lambda x, order: x[order[1] // 3], "they are not 3 a token"),
        (lambda x, order: x[order[1] // 2].masked_fill(masked(order[0], 3), 0), NOT_NOBODYS),
        (lambda x, order: x[order[1] // 2].masked_fill((x > 9).any(), 0), NOT_NOBODYS),
    ],
)
def test_rows_are_copies_only_where_that_is_shown(rows: Any, reason: str) -> None:
    if reason:
        check_first(First(rows), found=[(1, True, True)] * 2, reasons={reason: 2})
    else:
        check_first(First(rows), found=[TO_ROWS, TO_TOKENS], reasons={})


def inverse(order: Tensor) -> Tensor:
    """As transformers computes it."""
    result = torch.empty_like(order)
    result[order] = torch.arange(order.shape[0])
    return result


def added(y: Tensor, place: Tensor) -> Tensor:
    return y[place].view(-1, 2, y.shape[1]).sum(1)


def weighted(y: Tensor, gates: Tensor, order: Tensor) -> Tensor:
    return y * gates.reshape(-1)[order].unsqueeze(-1)


@pytest.mark.parametrize(
    ("result", "forward", "backward", "reasons"),
    [
        (lambda y, _, order: added(y, inverse(order[1])), TO_TOKENS, TO_ROWS, {}),
        (
            lambda y, gates, order: added(weighted(y, gates, order[1]), inverse(order[1])),
            TO_TOKENS,
            TO_ROWS,
            {},
        ),
        (
            lambda y, gates, order: added(weighted(y, gates, order[1].flip(0)), inverse(order[1])),
            (1, True, True),
            (1, True, True),
            {"their gates are not one a slot": 2},
        ),
        (
            lambda y, gates, order: added(
                weighted(y, gates.float(), order[1]), inverse(order[1])
            ).to(y.dtype),
            (1, True, True),
            (1, True, True),
            {"their gates are of another dtype": 2},
        ),
        (
            lambda y, gates, order: (
                added(weighted(y, gates, order[1]), inverse(order[1])) + y.sum(0)
            ),
            (1, True, True),
            (1, True, True),
            {"they are read again": 1},
        ),
        (
            lambda y, gates, order: added(y, inverse(order[1].flip(0))),
            (1, True, True),
            (1, True, True),
            {NOT_SORTED: 2},
        ),
        (lambda y, gates, order: added(y, order[1]), (1, True, True), (1, True, True), {}),
    ],
)
def test_rows_are_added_only_where_that_is_shown(
    result: Any, forward: Any, backward: Any, reasons: dict[str, int]
) -> None:
    layer = First(lambda x, _: torch.cat([x, x]), result)
    check_first(layer, found=[forward, backward], reasons=reasons)


def in_float32(y: Tensor, gates: Tensor, order: Order) -> Tensor:
    """What `added` and `weighted` give under autocast of CUDA, which a model need not round."""
    by_slot = weighted(y, gates, order[1])[inverse(order[1])].view(-1, 2, y.shape[1])
    return by_slot.sum(1, dtype=torch.promote_types(y.dtype, torch.float32))


@pytest.mark.parametrize("numerics", ["default", "strict"])
@pytest.mark.parametrize("rounded", [True, False])
def test_rows_are_added_in_float32(rounded: bool, numerics: str) -> None:
    """The op does so too, and rounds: strictly where the model does."""

    def result(y: Tensor, gates: Tensor, order: Order) -> Tensor:
        total = in_float32(y, gates, order)
        return total.to(y.dtype) if rounded else total

    keeps = numerics == "strict" and not rounded
    kept = {"qfuse.numerics='strict' keeps their sums in the model's dtype": 1} if keeps else {}
    check_first(
        First(lambda x, _: torch.cat([x, x]), result),
        found=[(1, True, True) if kept else TO_TOKENS, TO_ROWS],
        reasons=kept,
        numerics=numerics,
    )


class Routed(Experts):
    """Choices of a top-k among so many scores."""

    def __init__(self, scores: int) -> None:
        super().__init__("qwen3_moe", "grouped_mm", torch.bfloat16)
        self.scores = scores

    def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        scores = x.detach()[:, :1] * torch.linspace(-1, 1, self.scores, dtype=x.dtype)
        ids = scores.topk(2).indices
        return super().forward(x, ids if self.scores == EXPERTS else ids % EXPERTS, gates)


@pytest.mark.parametrize(("scores", "dtype"), [(EXPERTS, torch.int16), (7, torch.int64)])
def test_keys_are_narrow_where_a_top_k_shows_it(scores: int, dtype: torch.dtype) -> None:
    layer, args = Routed(scores), inputs(torch.bfloat16)
    result = compile_step(layer, *args, fullgraph=True)
    check_errors(result, step(layer, *args), in_float64(layer, args))
    assert products(result) == BY_TOKEN
    nodes = [n for graph in result.joint for n in graph.nodes]
    (keys,) = [n.args[0] for n in nodes if op_name(n) == "sort"]
    assert keys.meta["val"].dtype == dtype
