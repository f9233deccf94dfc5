"""Tell how far a sweep is: a line for each finished run, with the time that is left."""

from __future__ import annotations

import sys
from types import TracebackType

from inductor_q.tuning.plan import Condition
from inductor_q.tuning.runs import Run


class Progress:
    """Print to standard error: what runs, how many runs are left, and for about how long."""

    def __enter__(self) -> Progress:
        from rich.console import Console

        self.console = Console(file=sys.stderr, highlight=False, markup=False, soft_wrap=True)
        self.status = self.console.status("")
        self.status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.status.stop()

    def begin(self, condition: Condition, number: int, left: int, seconds: float | None) -> None:
        time = f", about {_minutes(seconds)} left" if seconds else ""
        runs = f", {left} runs to go{time}" if left else ""
        self.status.update(f"{condition.name}, order {number}{runs}")
        self._now = runs

    def end(self, run: Run) -> None:
        found = run.error or f"{run.step_s * 1e3:.1f} ms a step, compiled in {run.compile_s:.0f} s"
        self.console.print(f"{run.condition}, order {run.round}: {found}{self._now}")


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
