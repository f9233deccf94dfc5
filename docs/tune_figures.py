"""Show what `qfuse tune` has recorded, from a copy of its tune.jsonl in benchmarks/results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.place import RESULTS
from docs.read_results import table
from inductor_q.tuning import table as tuned
from inductor_q.tuning.choice import judge
from inductor_q.tuning.plan import REFERENCES, Condition
from inductor_q.tuning.runs import Run, Runs


def tune(name: str, folder: Path = RESULTS) -> str:
    """Return the table of the last sweep in a file, and where it was measured."""
    path = folder / f"{name}.jsonl"
    key = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])["key"]
    runs = overcome(Runs(path, key).read())
    references = {condition.name: condition for condition in REFERENCES}
    tried = {run.condition: Condition(run.condition, run.changes) for run in runs}
    shown = table(tuned.COLUMNS, tuned.rows(judge([*(references | tried).values()], runs)))
    return (
        f"{shown}\n\n[{path.name}](../benchmarks/results/{path.name}): {key['device']}, torch "
        f"{key['torch']}, model {key['model']}, {key['steps']} steps a run, digest of qfuse's "
        f"source {key['sources']}."
    )


def overcome(runs: Sequence[Run]) -> list[Run]:
    """Leave out what failed, and did not when it was run again."""
    good = {(run.condition, run.round) for run in runs if not run.error}
    return [run for run in runs if not run.error or (run.condition, run.round) not in good]
