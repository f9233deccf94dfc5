"""Show what a sweep has found, as a table and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from inductor_q.tuning.choice import Judged
from inductor_q.tuning.plan import BASE, STOCK

COLUMNS = (
    *("condition", "ms/step", "of base", "of stock"),
    *("compile s", "peak MB", "loss off", "verdict"),
)


def rows(judged: Sequence[Judged]) -> list[tuple[str, ...]]:
    """Return a row of text for each condition."""
    base, stock = (
        next((j.step_s for j in judged if j.condition == to), math.nan) for to in (BASE, STOCK)
    )
    return [
        (
            j.condition.name,
            _number(j.step_s * 1e3, ".1f"),
            _number(j.step_s / base, ".3f"),
            _number(j.step_s / stock, ".3f"),
            _number(j.compile_s, ".1f"),
            _number(j.peak / 1e6 or math.nan, ",.0f"),
            _number(j.loss_deviation, ".1e"),
            j.verdict,
        )
        for j in judged
    ]


def draw(judged: Sequence[Judged], title: str, path: Path) -> bool:
    """Draw a bar of each condition's milliseconds a step; False where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [j for j in judged if not math.isnan(j.step_s)][::-1]
    figure, axes = pyplot.subplots(figsize=(8, 0.4 * len(shown) + 1.2))
    colors = ["tab:green" if j.wins else "tab:gray" for j in shown]
    times = [j.step_s * 1e3 for j in shown]
    bars = axes.barh([j.condition.name for j in shown], times, color=colors)
    axes.bar_label(bars, [f"{time:.1f}" for time in times], padding=3, fontsize=8)
    for j in shown:
        if j.condition == BASE:
            axes.axvline(j.step_s * 1e3, color="black", linestyle=":", linewidth=0.8)
    axes.set_xlabel("ms a step (green: faster than the base beyond noise)")
    axes.set_title(title, fontsize=9)
    axes.margins(x=0.12)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)
    return True


def _number(value: float, form: str) -> str:
    return "" if math.isnan(value) else format(value, form)
