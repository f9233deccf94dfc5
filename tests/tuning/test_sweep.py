"""The order of runs, what a killed sweep measures again, what the budget leaves out."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from inductor_q.exc import BaseFailed
from inductor_q.presets import PRESETS
from inductor_q.tuning.plan import Condition
from inductor_q.tuning.runs import Run, Runs
from inductor_q.tuning.sweep import OutOfBudget, Sweep

SITES = {"extend_k": (0, 14)}
SIZES = {"rows": 128, "positions": 64, "logits": 128 * 264}


class Machine:
    """Stands for processes: a time for each condition, and an end after `most` runs."""

    def __init__(self, most: float = 1000, **seconds: float) -> None:
        self.seconds = {"base": 1.0, "eager": 3.0, **seconds}
        self.most = most
        self.ran: list[tuple[str, int]] = []

    def __call__(self, condition: Condition, number: int, left: float) -> Run:
        if len(self.ran) == self.most:
            raise KeyboardInterrupt
        self.ran.append((condition.name, number))
        run = Run(
            condition=condition.name,
            changes=dict(condition.changes),
            round=number,
            losses=(1.0, 1.0),
            sites=SITES,
            sizes=SIZES,
            peak=1,
        )
        seconds = self.seconds.get(condition.name, 1.0)
        return replace(run, seconds=(seconds,) * 4) if seconds else replace(run, error="it failed")


def sweep(path: Path, machine: Machine, budget_s: float = 1000) -> Sweep:
    return Sweep("cpu", PRESETS["cpu"], Runs(path / "tune.jsonl", {}), machine, budget_s)


ONE = ["base", "stock", "eager", "max_autotune_gemm", "extend_k.min_rows"]
BOTH_WIN = {"max_autotune_gemm": 0.9, "extend_k.min_rows": 0.8}
ORDER = [
    *((name, 1) for name in ONE),
    *((name, 2) for name in reversed(ONE)),
    ("base", 3),
    ("together", 3),
    ("together", 4),
    ("base", 4),
]


def test_two_orders_and_then_the_winners_together(tmp_path: Path) -> None:
    machine = Machine(**BOTH_WIN, together=0.7)
    done = sweep(tmp_path, machine)
    done.run()
    assert machine.ran == ORDER
    assert done.complete and done.best
    assert done.best.condition.name == "together"
    assert dict(done.best.condition.changes) == {"max_autotune_gemm": True, "extend_k.min_rows": 96}


def test_together_may_be_slower_than_the_best(tmp_path: Path) -> None:
    done = sweep(tmp_path, Machine(**BOTH_WIN, together=0.95))
    done.run()
    assert done.best and done.best.condition.name == "extend_k.min_rows"


def test_without_winners_there_is_no_best(tmp_path: Path) -> None:
    machine = Machine()
    done = sweep(tmp_path, machine)
    done.run()
    assert done.complete and done.best is None
    assert machine.ran == ORDER[:10]


@pytest.mark.parametrize("killed_after", [0, 1, 6, 11, 13])
def test_a_killed_sweep_goes_on_where_it_was(killed_after: int, tmp_path: Path) -> None:
    first = Machine(killed_after, **BOTH_WIN, together=0.7)
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path, first).run()
    second = Machine(**BOTH_WIN, together=0.7)
    done = sweep(tmp_path, second)
    done.run()
    assert first.ran + second.ran == ORDER
    assert done.best and done.best.condition.name == "together"


def test_a_slow_last_round_does_not_change_what_is_run(tmp_path: Path) -> None:
    """It widens the noise of the base: then nothing wins, but the winners of two rounds did run."""

    class Busy(Machine):
        def __call__(self, condition: Condition, number: int, left: float) -> Run:
            self.seconds["base"] = 9.0 if number == 4 else 1.0
            return super().__call__(condition, number, left)

    done = sweep(tmp_path, Busy(**BOTH_WIN, together=0.7))
    done.run()
    again = sweep(tmp_path, Machine(most=0))
    again.run()
    assert done.best is None and again.complete
    assert again.conditions == done.conditions and len(done.conditions) == 6


def test_a_whole_sweep_is_not_run_again(tmp_path: Path) -> None:
    sweep(tmp_path, Machine(**BOTH_WIN)).run()
    again = Machine()
    done = sweep(tmp_path, again)
    done.run()
    assert again.ran == [] and done.complete and done.best


def test_what_failed_is_not_run_in_the_other_order(tmp_path: Path) -> None:
    machine = Machine(max_autotune_gemm=0.0)
    done = sweep(tmp_path, machine)
    done.run()
    assert ("max_autotune_gemm", 2) not in machine.ran
    assert done.judged[3].verdict == "rejected: it failed"


def test_what_failed_is_run_again_by_the_same_command(tmp_path: Path) -> None:
    """A script that was missing left its error behind for good."""
    with pytest.raises(BaseFailed):
        sweep(tmp_path, Machine(base=0.0)).run()
    sweep(tmp_path, Machine(max_autotune_gemm=0.0)).run()
    again = Machine()
    done = sweep(tmp_path, again)
    done.run()
    assert again.ran == [("max_autotune_gemm", 1), ("max_autotune_gemm", 2)]
    assert done.complete and "rejected" not in done.judged[3].verdict


def test_a_base_that_fails_ends_it(tmp_path: Path) -> None:
    with pytest.raises(BaseFailed, match="it failed"):
        sweep(tmp_path, Machine(base=0.0)).run()


def test_the_budget_ends_it_with_what_there_is(tmp_path: Path) -> None:
    machine = Machine()
    done = sweep(tmp_path, machine, budget_s=0)
    done.run()
    assert machine.ran == [] and not done.complete and done.best is None


def test_a_run_that_takes_longer_than_the_budget_is_not_recorded(tmp_path: Path) -> None:
    machine = Machine()

    def launch(condition: Condition, number: int, left: float) -> Run:
        if condition.name == "eager":
            raise OutOfBudget
        return machine(condition, number, left)

    done = Sweep("cpu", PRESETS["cpu"], Runs(tmp_path / "t", {}), launch, 100)
    done.run()
    assert not done.complete
    assert [run.condition for run in done.runs.read()] == ["base", "stock", "stock", "base"]


class Timed(Machine):
    """A machine whose runs take time: 60 s with empty caches, 35 s with full ones; 300 s with empty
    ones for the condition `slow`."""

    def __init__(self, clock: list[float], slow: str = "", **seconds: float) -> None:
        super().__init__(**seconds)
        self.clock, self.slow = clock, slow
        self.filled: set[str] = set()

    def __call__(self, condition: Condition, number: int, left: float) -> Run:
        cold = condition.name not in self.filled
        wall = (300.0 if condition.name == self.slow else 60.0) if cold else 35.0
        if wall > left:
            self.clock[0] += left
            raise OutOfBudget
        self.filled.add(condition.name)
        self.clock[0] += wall
        run = super().__call__(condition, number, left)
        return replace(run, cold=cold, compile_s=wall - 10.0 if cold else 5.0, wall_s=wall)


def test_a_small_budget_is_for_both_orders_of_what_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went to the first order of all conditions, and no change could win."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    machine = Timed(clock, max_autotune_gemm=0.5)
    done = sweep(tmp_path, machine, budget_s=380)
    done.run()
    assert machine.ran == [*((n, 1) for n in ONE[:4]), *((n, 2) for n in reversed(ONE[:4]))]
    assert clock[0] <= 380 and not done.complete
    assert done.best and done.best.condition.name == "max_autotune_gemm"
    again = sweep(tmp_path, machine, budget_s=1000)
    again.run()
    assert machine.ran[8:] == [(ONE[4], 1), (ONE[4], 2)] and again.complete


@pytest.mark.parametrize("budget_s", [800, 780])
def test_one_slow_compile_does_not_keep_the_others_from_running(
    budget_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 780 s the last condition has no room beside the second order as reckoned, and has some
    once that has run."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    done = sweep(tmp_path, Timed(clock, slow="max_autotune_gemm"), budget_s)
    done.run()
    assert done.complete and clock[0] <= budget_s
