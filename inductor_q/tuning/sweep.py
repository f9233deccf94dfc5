"""Run the plan: each condition in two orders, then the winners together beside the base."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from inductor_q.exc import BaseFailed
from inductor_q.presets import Preset
from inductor_q.tuning import plan
from inductor_q.tuning.choice import Judged, judge
from inductor_q.tuning.plan import BASE, EAGER, Condition
from inductor_q.tuning.runs import Run, Runs


class OutOfBudget(Exception):
    """The next run would end after the budget does."""


#: Measures a condition in one round, given the seconds that are left; the budget's end raises.
Launch = Callable[[Condition, int, float], Run]


@dataclass
class Sweep:
    """Measure what is not remembered yet, until the budget ends; `judged` and `best` are what came
    of it."""

    device: str
    preset: Preset
    runs: Runs
    launch: Launch
    budget_s: float
    compute: Sequence[str] = ()
    begin: Callable[[Condition, int, int, float | None], None] = lambda *_: None
    end: Callable[[Run], None] = lambda run: None
    conditions: list[Condition] = field(default_factory=lambda: [BASE, EAGER])
    left_out: dict[str, str] = field(default_factory=dict)
    complete: bool = False

    def __post_init__(self) -> None:
        # What failed is run again: the script may be there now, or memory of the GPU free.
        self.known = [run for run in self.runs.read() if not run.error]
        self._deadline = time.monotonic() + self.budget_s

    def run(self) -> None:
        """Run all conditions.

        Raises:
            BaseFailed: the base gives no measurement, so nothing can be held against it.
        """
        try:
            base = self._get(BASE, 1)
            if base.error:
                raise BaseFailed(problem=base.error)
            singles, self.left_out = plan.singles(
                self.device, self.preset, base, compute=self.compute
            )
            self.conditions += singles
            self._round(self.conditions[1:], 1)
            self._round([c for c in reversed(self.conditions) if not self._failed(c)], 2)
            if len(winners := self._winners()) > 1:
                both = plan.together(winners)
                self.conditions.append(both)
                self._round([BASE, both], 3)
                self._round([both, BASE], 4)
            self.complete = True
        except OutOfBudget:
            pass

    @property
    def judged(self) -> list[Judged]:
        return judge(self.conditions, self.known)

    @property
    def best(self) -> Judged | None:
        """The fastest of the winners with changes that a preset may make."""
        return min(_won(self.judged), key=lambda j: j.step_s, default=None)

    def _winners(self) -> list[Condition]:
        """List the winners whose changes a preset may make, the slowest first: where two set the
        same, the faster one's value holds.

        The first two rounds say it. Those after them measure the base again, which would change who
        won when a sweep is resumed."""
        won = _won(judge(self.conditions, [run for run in self.known if run.round <= 2]))
        return [j.condition for j in sorted(won, key=lambda j: -j.step_s)]

    def _failed(self, condition: Condition) -> bool:
        return any(run.error for run in self.known if run.condition == condition.name)

    def _round(self, conditions: Sequence[Condition], number: int) -> None:
        for position, condition in enumerate(conditions):
            self._get(condition, number, self._runs_left(len(conditions) - position, number))

    def _runs_left(self, here: int, number: int) -> int:
        return here + (len(self.conditions) if number == 1 else 0)

    def _get(self, condition: Condition, number: int, left: int = 0) -> Run:
        """Return the run that is remembered, or else a new one."""
        for run in self.known:
            same = run.condition == condition.name and dict(run.changes) == dict(condition.changes)
            if same and run.round == number:
                return run
        seconds = self._deadline - time.monotonic()
        usual = max((run.wall_s for run in self.known[-4:]), default=0.0)
        if seconds <= usual:
            raise OutOfBudget
        self.begin(condition, number, left, usual * left if usual and left else None)
        run = self.launch(condition, number, seconds)
        self.runs.append(run)
        self.known.append(run)
        self.end(run)
        return run


def _won(judged: Sequence[Judged]) -> list[Judged]:
    return [j for j in judged if j.wins and plan.may_last(j.condition)]


__all__ = ["EAGER", "Launch", "OutOfBudget", "Sweep"]
