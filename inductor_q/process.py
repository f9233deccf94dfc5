"""The report of a process: what became of the quantized layers over all of its graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import get_args

from torch import nn

from inductor_q import backend
from inductor_q.capture import live
from inductor_q.capture.live import layers_of
from inductor_q.compiled_for import is_compiled
from inductor_q.graph_report import Report
from inductor_q.verdict import Status, Verdict, counted, match

UNSEEN = "its forward ran uncompiled, or did not run"

_BEST_FIRST: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True)
class ProcessReport:
    """Sum up the graphs that qfuse has compiled in this process.

    `layers` judges each quantized layer, by module path, as its worst graph does; one that no graph
    read is rejected. `breaks` counts the graph breaks of everything that Dynamo has compiled;
    `qfuse explain` also finds those that torch's counters miss. `at_limit` counts functions that
    got no further graph at torch's recompile limit: where none of theirs fits, the layers in them
    run in eager mode, whatever `layers` says of the graphs.
    """

    reports: tuple[Report, ...] = ()
    layers: dict[str, Verdict] = field(default_factory=dict)
    breaks: int = 0
    at_limit: int = 0

    @property
    def graphs(self) -> int:
        return len(self.reports)

    @property
    def fused(self) -> int:
        return sum(verdict.status == "fused" for verdict in self.layers.values())

    @property
    def fused_anywhere(self) -> bool:
        """Whether any graph has fused any layer. `fused` judges each layer by its worst graph,
        which may be that of evaluation."""
        judged = (verdict for one in self.reports for verdict in one.verdicts().values())
        return any(verdict.status == "fused" for verdict in judged)

    @property
    def is_clean(self) -> bool:
        """Whether each layer is fused, or left to its library by choice, without a break, and
        nothing was refused a graph."""
        accepted = all(verdict.is_accepted for verdict in self.layers.values())
        return accepted and not self.breaks and not self.at_limit

    def reasons(self) -> Counter[str]:
        """Count the reasons why layers are not fused."""
        return Counter(v.reason for v in self.layers.values() if not v.is_accepted)

    def summary(self) -> str:
        """Sum up in one line the fused layers, the graphs and the breaks, and what to do next."""
        layers = counted(self.layers) if self.layers else "no quantized layer"
        line = (
            f"qfuse: {layers}; {_several(self.graphs, 'graph')}, {_several(self.breaks, 'break')}"
        )
        if self.at_limit:
            functions = _several(self.at_limit, "function")
            line += f"; {functions} at the recompile limit, partly in eager mode"
        reasons = self.reasons()
        for reason, count in reasons.most_common(1):
            others = f" and {rest} for other reasons" if (rest := reasons.total() - count) else ""
            line += f"; {count} not fused{others}: {reason}"
        return line if self.is_clean else f"{line}; run `qfuse explain` for the causes"


def report(model: nn.Module | None = None) -> ProcessReport:
    """Return what became of quantized layers over all graphs of this process.

    Args:
        model: count the layers of this model only, and no graph of another model that is alive;
            otherwise the layers of every model that is alive, where a graph read some layer of it,
            or of all where no graph read any. Breaks are those of the process since the last reset,
            or since `inductor_q.compile` or a callback first compiled `model`.
    """
    reports = backend.reports() if model is None else backend.reports_of(model)
    judged = _judged(reports)
    if model is not None:
        layers = _by_path((layer.module for layer in layers_of(model)), judged)
    else:
        layers = _of_live_models(judged)
        # Others are of models that are gone by now.
        named = {match(path, judged) for path in layers}
        layers |= {path: verdict for path, verdict in judged.items() if path not in named}
    breaks, limits = backend.graph_breaks(model), backend.functions_at_limit(model)
    return ProcessReport(reports, layers, breaks, limits)


def _of_live_models(judged: dict[str, Verdict]) -> dict[str, Verdict]:
    """Judge the layers of every model of which a graph has read a layer, or of all models where
    there is no such one.

    A graph is that of a model for which it was compiled. Another one that is compiled too may run
    it, where its layers have the same paths.
    """
    models = {id(root): root for root in live.roots()}
    every = {id(p) for root in models.values() for p in root.parameters()}
    trees: dict[int, list[str]] = {}
    for layer in layers_of(*models.values()):
        trees.setdefault(layer.tree, []).append(layer.module)
    own = {tree: _judged(backend.reports_of(models[tree], every)) for tree in trees}
    own |= {tree: judged for tree in trees if not own[tree] and is_compiled(models[tree])}
    read = [tree for tree, paths in trees.items() if any(match(p, own[tree]) for p in paths)]
    layers: dict[str, Verdict] = {}
    for tree in read or trees:
        for path, verdict in _by_path(trees[tree], own[tree]).items():
            layers[path] = _worse(layers.get(path), verdict)
    return layers


def _judged(reports: Iterable[Report]) -> dict[str, Verdict]:
    """Judge each layer that a graph has read as its worst graph does."""
    judged: dict[str, Verdict] = {}
    for one in reports:
        for path, verdict in one.verdicts().items():
            judged[path] = _worse(judged.get(path), verdict)
    return judged


def _by_path(paths: Iterable[str], judged: dict[str, Verdict]) -> dict[str, Verdict]:
    names = {path: match(path, judged) for path in paths}
    unseen = Verdict("rejected", UNSEEN)
    return {path: judged[name] if name else unseen for path, name in names.items()}


def _worse(one: Verdict | None, other: Verdict) -> Verdict:
    if one is None or _BEST_FIRST.index(other.status) > _BEST_FIRST.index(one.status):
        return other
    return one


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
