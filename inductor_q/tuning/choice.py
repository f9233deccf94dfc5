"""Judge conditions by their runs: which are faster than the base, and why others do not count."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inductor_q.tuning.plan import BASE, EAGER, REFERENCES, Condition
from inductor_q.tuning.runs import Run

LEAST_GAIN = 0.01  # a preset should not follow noise
MOST_PEAK = 1.25  # of the base's: "auto" will also be in force for models that just fit
LITTLE = 1 / 16  # of the device's memory, which a condition may take more whatever the base takes
REFERENCE_VERDICTS = {
    "base": "what the others are held against",
    "stock": "Inductor without qfuse, for comparison",
    "eager": "the reference of losses",
}
ROUNDS = 2  # the orders in which conditions run, one forwards and one backwards
ROUNDING = 1e-4  # of the loss, where the base does not differ from eager at all


@dataclass(frozen=True)
class Judged:
    """Hold what the runs of a condition come to. `verdict` is a sentence for the table; only with
    `wins` may a preset have its changes."""

    condition: Condition
    step_s: float = math.nan
    noise: float = 0.0  # how far its runs are apart, as a share
    compile_s: float = math.nan
    peak: int = 0
    memory: int = 0  # of the device, if known
    loss_deviation: float = math.nan  # from the base's, at worst
    wins: bool = False
    verdict: str = ""


def judge(conditions: Sequence[Condition], runs: Sequence[Run]) -> list[Judged]:
    """Judge each condition against the base; one that lacks runs of `ROUNDS` does not win."""
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(run.condition, []).append(run)
    base = measured(BASE, by_name)
    bound = allowed(by_name)
    return [_judged(c, by_name, base, bound) for c in conditions]


def measured(condition: Condition, by_name: Mapping[str, Sequence[Run]]) -> Judged:
    """Sum up the runs of a condition, without a verdict."""
    runs = [run for run in by_name.get(condition.name, ()) if not run.error]
    if not runs:
        return Judged(condition)
    steps = [run.step_s for run in runs]
    middle = statistics.median(steps)
    return Judged(
        condition,
        step_s=middle,
        noise=(max(steps) - min(steps)) / middle,
        compile_s=max((run.compile_s for run in runs if run.cold), default=math.nan),
        peak=max(run.peak for run in runs),
        memory=max(run.memory for run in runs),
        loss_deviation=max(_apart(run, _first(BASE, by_name)) for run in runs),
    )


def allowed(by_name: Mapping[str, Sequence[Run]]) -> float:
    """Return how far a condition's loss may be from the base's.

    Two compilations that are each as close to eager as the base is are at most twice that apart.
    """
    base, eager = _first(BASE, by_name), _first(EAGER, by_name)
    if base is None or not base.losses:
        return math.nan
    size = max(map(abs, base.losses))
    if eager is None:
        return 100 * ROUNDING * size
    return max(2 * _apart(base, eager), ROUNDING * size)


def _judged(
    condition: Condition,
    by_name: Mapping[str, Sequence[Run]],
    base: Judged,
    bound: float,
) -> Judged:
    runs = by_name.get(condition.name, [])
    found = measured(condition, by_name)
    gain = 1 - found.step_s / base.step_s
    noise = max(LEAST_GAIN, base.noise, found.noise)
    wins = False
    if failed := [run.error for run in runs if run.error]:
        verdict = f"rejected: {failed[0]}"
    elif not runs:
        verdict = "not measured: the budget ended"
    elif condition in REFERENCES:
        verdict = REFERENCE_VERDICTS[condition.name]
    elif not found.loss_deviation <= bound:
        verdict = f"rejected: its loss is {found.loss_deviation:.2g} off, {bound:.2g} is allowed"
    elif len(runs) < ROUNDS:
        verdict = "measured in one order alone: the budget ended"
    elif found.peak > max(MOST_PEAK * base.peak, base.peak + LITTLE * found.memory):
        verdict = f"rejected: takes {found.peak / base.peak:.2f} times the memory"
    elif gain < -noise:
        verdict = f"{-gain:.1%} slower, noise {noise:.1%}"
    elif gain <= noise:
        verdict = f"no gain beyond the noise of {noise:.1%}"
    else:
        wins, verdict = True, f"{gain:.1%} faster, noise {noise:.1%}"
    if runs and (skips := max(run.skips for run in runs)):
        verdict += f"; torch kept {skips} graph{'s' * (skips > 1)} out of CUDA graphs"
    return Judged(**{**vars(found), "wins": wins, "verdict": verdict})


def _first(condition: Condition, by_name: Mapping[str, Sequence[Run]]) -> Run | None:
    return next((run for run in by_name.get(condition.name, ()) if not run.error), None)


def _apart(one: Run, other: Run | None) -> float:
    """Return the largest difference of two runs' losses; NaN where they cannot be compared."""
    if other is None or len(one.losses) != len(other.losses) or not one.losses:
        return math.nan
    apart = [abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)]
    return math.nan if any(map(math.isnan, apart)) else max(apart)
