"""Make the preset of what a sweep has found, with the measurement as its evidence."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import replace

from inductor_q.presets import Preset
from inductor_q.tuning.choice import Judged
from inductor_q.tuning.launch import changed
from inductor_q.tuning.plan import BASE, REFERENCES, STOCK


def preset_of(
    preset: Preset, best: Judged, judged: Sequence[Judged], *, model: str, steps: int
) -> Preset:
    """Return the preset that ships with the changes of the best condition."""
    [base] = [j for j in judged if j.condition == BASE]
    stock = next((j.step_s for j in judged if j.condition == STOCK), math.nan)
    other = "" if math.isnan(stock) else f" (stock Inductor {stock * 1e3:.1f})"
    today = datetime.date.today().isoformat()
    of = f"{model or 'the default model'}, {steps} steps, {today}"
    evidence = (
        f"{best.condition.name}: {best.step_s * 1e3:.1f} ms a step against "
        f"{base.step_s * 1e3:.1f}{other}, peak {best.peak / 1e6:,.0f} MB against "
        f"{base.peak / 1e6:,.0f}, compile {best.compile_s:.0f} s against {base.compile_s:.0f} "
        f"({of}; other sizes were not measured)"
    )
    others = (j for j in judged if j.condition not in (*REFERENCES, best.condition))
    facts = (f"{j.condition.name}: {j.verdict} ({of})" for j in others)
    return replace(changed(preset, best.condition, evidence=evidence), facts=tuple(facts))


def named(best: Judged) -> list[str]:
    """Return `name=value` for each change."""
    return [f"{name}={value}" for name, value in best.condition.changes.items()]
