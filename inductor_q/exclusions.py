"""Match the patterns of `qfuse.compute.exclude` with the paths of layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from inductor_q.graph_report import Report

#: How many of a graph's layers a warning names.
NAMED = 8


def excluded_by(path: str, patterns: Iterable[str]) -> str:
    """Return the first pattern that a module's path, or the end of it, matches; "" for none.

    A graph names a layer from the module that was compiled, which may be a wrapper around the
    model: so "layers.0.*" is also for `base_model.model.layers.0.mlp.up_proj`.
    """
    found = (p for p in patterns if fnmatchcase(path, p) or fnmatchcase(path, f"*.{p}"))
    return next(found, "")


def without_effect(patterns: Sequence[str], reports: Sequence[Report]) -> str:
    """Say which patterns match no layer of the graphs so far, and what there is to match; "" where
    all do, or where the last graph has no layer that the option is for.
    """
    names = [report.multiplied() for report in reports]
    if not names or not names[-1]:
        return ""
    known = {name for of_graph in names for name in of_graph}
    unused = [p for p in patterns if not any(excluded_by(name, (p,)) for name in known)]
    if not unused:
        return ""
    some = ", ".join(sorted(names[-1])[:NAMED]) + (", ..." if len(names[-1]) > NAMED else "")
    whose = f"graph {reports[-1].graph}, where these may: {some}"
    return f"{', '.join(map(repr, unused))}: no such layer may be in eight bits in {whose}"
