"""The verdicts of `qfuse tune`, from records of runs."""

from __future__ import annotations

import math
from typing import Any

import pytest

from inductor_q.tuning.choice import Judged, judge
from inductor_q.tuning.plan import BASE, EAGER, STOCK, Condition
from inductor_q.tuning.runs import Run

KNOB = Condition("knob", {"max_autotune_gemm": True})


def runs(name: str, *seconds: float, **fields: Any) -> list[Run]:
    """A run for each time of a step."""
    fields = {"losses": (2.0, 1.0), "peak": 1000, "compile_s": 5.0, **fields}
    return [
        Run(condition=name, round=n, seconds=(s,) * 4, **fields) for n, s in enumerate(seconds, 1)
    ]


OTHERS = [*runs("base", 1.0, 1.02), *runs("eager", 3.0, 3.0, losses=(2.001, 1.0))]


def verdict(*found: Run, others: list[Run] = OTHERS) -> Judged:
    return judge([BASE, EAGER, KNOB], [*others, *found])[-1]


def test_faster_in_both_orders_wins() -> None:
    found = verdict(*runs("knob", 0.9, 0.91))
    assert found.wins
    assert found.verdict == "10.4% faster, noise 2.0%"
    assert (found.step_s, found.peak, found.compile_s) == (0.905, 1000, 5.0)


@pytest.mark.parametrize("seconds", [(1.0, 1.0), (0.995, 0.995), (0.8, 1.1), (1.0, 1.6)])
def test_no_gain_beyond_the_noise(seconds: tuple[float, ...]) -> None:
    found = verdict(*runs("knob", *seconds))
    assert not found.wins and found.verdict.startswith("no gain beyond the noise")


def test_slower_is_said() -> None:
    found = verdict(*runs("knob", 1.515, 1.515))
    assert not found.wins and found.verdict == "50.0% slower, noise 2.0%"


def test_noise_of_the_base_counts() -> None:
    noisy = [*runs("base", 0.9, 1.1), *runs("eager", 3.0, 3.0, losses=(2.001, 1.0))]
    assert not verdict(*runs("knob", 0.85, 0.85), others=noisy).wins


@pytest.mark.parametrize(
    ("loss", "wins"), [(2.0, True), (2.0019, True), (2.0021, False), (math.nan, False)]
)
def test_loss_may_be_off_by_twice_what_the_base_is_off_eager(loss: float, wins: bool) -> None:
    found = verdict(*runs("knob", 0.5, 0.5, losses=(loss, 1.0)))
    assert found.wins is wins
    if not wins:
        assert found.verdict.startswith("rejected: its loss is")
        assert found.verdict.endswith("off, 0.002 is allowed")


def test_a_loss_of_fewer_steps_cannot_be_compared() -> None:
    assert not verdict(*runs("knob", 0.5, 0.5, losses=(2.0,))).wins


def test_without_eager_the_bound_is_a_share_of_the_loss() -> None:
    base = runs("base", 1.0, 1.0)
    assert verdict(*runs("knob", 0.5, 0.5, losses=(2.01, 1.0)), others=base).wins
    assert not verdict(*runs("knob", 0.5, 0.5, losses=(2.03, 1.0)), others=base).wins


def test_a_condition_that_fails_has_its_reason() -> None:
    found = verdict(Run(condition="knob", error="exit status 1: RuntimeError: out of memory"))
    assert found.verdict == "rejected: exit status 1: RuntimeError: out of memory"
    assert math.isnan(found.step_s)


def test_memory_is_not_taken_for_speed() -> None:
    found = verdict(*runs("knob", 0.5, 0.5, peak=1300))
    assert not found.wins and found.verdict == "rejected: takes 1.30 times the memory"
    assert verdict(*runs("knob", 0.5, 0.5, peak=1300, memory=4800)).wins  # 300 of it is little
    assert not verdict(*runs("knob", 0.5, 0.5, peak=1301, memory=4800)).wins


def test_one_order_is_not_enough() -> None:
    found = verdict(*runs("knob", 0.5))
    assert not found.wins and "one order" in found.verdict
    assert verdict().verdict == "not measured: the budget ended"


def test_stock_never_wins_and_skipped_graphs_are_said() -> None:
    found = [*OTHERS, *runs("stock", 0.5, 0.5), *runs("knob", 1.0, 1.0, skips=2)]
    stock, knob = judge([BASE, EAGER, STOCK, KNOB], found)[2:]
    assert not stock.wins and stock.verdict == "Inductor without qfuse, for comparison"
    assert knob.verdict.endswith("; torch kept 2 graphs out of CUDA graphs")


def test_compile_time_is_that_of_empty_caches() -> None:
    warm = [Run(**{**vars(run), "cold": False, "compile_s": 9.0}) for run in runs("knob", 0.5)]
    assert verdict(*runs("knob", 0.5), *warm).compile_s == 5.0
