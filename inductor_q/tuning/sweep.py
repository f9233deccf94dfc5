"""Run the plan: each condition in two orders, then the winners together beside the base."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from inductor_q.exc import BaseFailed
from inductor_q.presets import Preset
from inductor_q.tuning import plan
from inductor_q.tuning.choice import ROUNDS, Judged, judge
from inductor_q.tuning.plan import BASE, EAGER, REFERENCES, Condition
from inductor_q.tuning.runs import Run, Runs


class OutOfBudget(Exception):
    """The next run would end after the budget does."""


#: The share of the compile time that full caches spare at least: 0.7 to 0.9 was seen.
SPARED = 0.6

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
    conditions: list[Condition] = field(default_factory=lambda: [*REFERENCES])
    left_out: dict[str, str] = field(default_factory=dict)
    complete: bool = False

    def __post_init__(self) -> None:
        # What failed is run again: the script may be there now, or memory of the GPU free.
        self.known = [run for run in self.runs.read() if not run.error]
        self._deadline = time.monotonic() + self.budget_s
        self._warm: set[str] = set()  # conditions whose caches this process has filled

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
            done = 0  # the second order may leave time that was kept for it
            while done < len(self.conditions):
                first = self._first_order()
                self._round([c for c in reversed(first) if not self._failed(c)], 2)
                if len(first) == done:
                    raise OutOfBudget
                done = len(first)
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
        won = _won(judge(self.conditions, [run for run in self.known if run.round <= ROUNDS]))
        return [j.condition for j in sorted(won, key=lambda j: -j.step_s)]

    def _failed(self, condition: Condition) -> bool:
        return any(run.error for run in self.known if run.condition == condition.name)

    def _first_order(self) -> list[Condition]:
        """Run conditions once, as many as the budget leaves time to run in the second order too,
        and return them: of one order alone nothing follows."""
        done: list[Condition] = []
        for condition in self.conditions:
            later = [c for c in (*done, condition) if not self._failed(c)]
            kept = self._usual(later, 2)
            try:
                self._get(condition, 1, self.conditions, kept)
            except OutOfBudget:
                break
            done.append(condition)
        return done

    def _round(self, conditions: Sequence[Condition], number: int) -> None:
        for condition in conditions:
            self._get(condition, number, conditions)

    def _find(self, condition: Condition, number: int) -> Run | None:
        for run in self.known:
            same = run.condition == condition.name and dict(run.changes) == dict(condition.changes)
            if same and run.round == number:
                return run
        return None

    def _usual(self, conditions: Iterable[Condition], number: int) -> float:
        """Return for how many seconds conditions are likely to run that have not run yet."""
        compiled = (run for run in self.known if run.cold and run.compile_s)
        cold = sorted(compiled, key=lambda run: run.wall_s)
        usual = cold[len(cold) // 2] if cold else None
        seconds = 0.0
        for condition in conditions:
            first = self._find(condition, 1)
            like = first or usual
            if like is None or self._find(condition, number):
                continue
            spared = 0.0
            if first is None and condition == EAGER:
                spared = 1.0
            elif condition.name in self._warm or (number == 2 and first is None):
                spared = SPARED
            seconds += like.wall_s - spared * like.compile_s
        return seconds

    def _get(
        self, condition: Condition, number: int, of: Sequence[Condition] = (), kept: float = 0.0
    ) -> Run:
        """Return the run that is remembered, or else a new one, which leaves `kept` seconds. Of the
        conditions `of` those that have not run yet are said to be left."""
        if found := self._find(condition, number):
            return found
        seconds = self._deadline - time.monotonic() - kept
        if seconds <= self._usual([condition], number):
            raise OutOfBudget
        rounds = (1, 2) if number == 1 else (number,)
        left = [(c, n) for n in rounds for c in of if not self._find(c, n)]
        time_left = sum(self._usual([c], n) for c, n in left)
        self.begin(condition, number, len(left), time_left or None)
        run = self.launch(condition, number, seconds)
        self._warm.add(condition.name)
        self.runs.append(run)
        self.known.append(run)
        self.end(run)
        return run


def _won(judged: Sequence[Judged]) -> list[Judged]:
    return [j for j in judged if j.wins and plan.may_last(j.condition)]


__all__ = ["EAGER", "Launch", "OutOfBudget", "Sweep"]
