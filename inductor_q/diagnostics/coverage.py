"""Fusion coverage: what became of each quantized layer, attention and loss, by module path.

It is put together from the reports of the compiles (one site per pass and layer), the names of the
graphs' inputs (what a graph read at all) and the layers alive in the process (what there is to
cover).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from inductor_q.capture.live import Quantized
from inductor_q.diagnostics import serving
from inductor_q.diagnostics.explanation import (
    BESIDE,
    STATUSES,
    Layer,
    LayerStatus,
    Serving,
    Step,
)
from inductor_q.graph_report import Report, SiteRecord
from inductor_q.verdict import Verdict, match

UNSEEN = "its forward ran uncompiled, or did not run"
FAILED = "its compile failed: {}"
BLIND = "compiled by backend {!r}, where the passes cannot look: run with --backend qfuse"


def layers(
    reports: Iterable[tuple[Report, bool]],
    live: Iterable[Quantized],
    read: Mapping[str, str],
    *,
    all_trees: bool = True,
) -> tuple[Layer, ...]:
    """Return one record per layer, in the order of the model.

    Args:
        reports: the reports of the compiles; True where one is of what qfuse would do.
        live: the quantized layers found in memory.
        read: module paths that the inputs of compiled graphs come from, each with the reason why
            a layer there may have no site.
        all_trees: count the layers also of a model of which no compiled graph read anything.
    """
    covered: dict[str, Layer] = {}
    for report, would in reports:
        for name, verdict in report.verdicts().items():
            _add(covered, _layer(name, verdict, would))
    found: dict[str, Layer] = {}
    live = tuple(live)
    trees = {w.tree for w in live} if all_trees else _read_trees(live, read)
    for weight in (w for w in live if w.tree in trees):
        known = match(weight.module, covered)
        layer = covered[known] if known else _uncovered(weight, read)
        found[weight.module] = replace(
            layer,
            module=weight.module,
            kind=weight.kind,
            format=weight.format,
            shape=weight.shape or layer.shape,
            library=weight.library,
            layout=weight.layout,
            serving=tuple(serving.of_weight(one, weight) for one in layer.serving)
            or (Serving("", weight.library),),
        )
    matched = {match(name, covered) for name in found}
    rest = {name: layer for name, layer in covered.items() if name not in matched}
    return (*found.values(), *rest.values())


def beside(kind: str, reports: Iterable[tuple[Report, bool]]) -> tuple[Layer, ...]:
    """Return one record per module that a pass of `BESIDE` looked at; see `layers`."""
    covered: dict[str, Layer] = {}
    for report, would in reports:
        for site in (s for s in report.sites if s.pass_name == BESIDE[kind]):
            one = Layer(
                module=site.module or site.source,
                kind=kind,
                format="",
                status="canonical" if site.rejected else "fused",
                reason=site.rejected,
                shape=site.shape,
                source=site.source,
                steps=_steps([site]),
                would=would,
            )
            _add(covered, one)
    return tuple(covered.values())


def _read_trees(live: Iterable[Quantized], read: Mapping[str, str]) -> set[int]:
    """Find the module trees that compiled graphs read, by paths, which two models may share.

    A tree counts only if graphs read more of it than the trees already counted explain; those of
    which more is read come first, and of these the ones whose paths graphs have whole. So a model
    that lives on from an earlier run is not taken for the compiled one's twin.
    """
    paths: dict[int, set[str]] = {}
    for weight in live:
        paths.setdefault(weight.tree, set()).add(weight.module)
    hits = {tree: {match(p, read) for p in own} - {""} for tree, own in paths.items()}

    def share(tree: int) -> tuple[float, int]:
        return len(hits[tree]) / len(paths[tree]), len(paths[tree] & read.keys())

    explained: set[str] = set()
    trees = set()
    for tree in sorted(hits, key=share, reverse=True):
        if hits[tree] - explained:
            explained |= hits[tree]
            trees.add(tree)
    return trees


def _layer(name: str, verdict: Verdict, would: bool) -> Layer:
    main = next(iter(verdict.sites), None)
    is_linear = main is None or len(main.shape) < 3 or "gemm" in main.target
    return Layer(
        module=name,
        kind="linear" if is_linear else "experts",
        format="",
        status=verdict.status,
        reason=verdict.reason,
        source=next((s.source for s in verdict.sites if s.source), ""),
        steps=_steps(verdict.sites),
        would=would,
        serving=_serving(verdict.sites),
    )


def _serving(sites: Sequence[SiteRecord]) -> tuple[Serving, ...]:
    """Find the op that reads a weight when all passes have run: that of the last that made one."""
    last = [Serving(site.op, site.provider) for site in sites if site.op]
    return tuple(last[-1:])


def _steps(sites: Sequence[SiteRecord]) -> tuple[Step, ...]:
    found: dict[tuple[str, str, str], Step] = {}
    for site in sites:
        key = (site.pass_name, site.provider, site.rejected)
        step = found.get(key) or Step(
            site.pass_name, site.provider, site.rejected, site.by_choice, count=0
        )
        found[key] = replace(
            step, count=step.count + 1, bytes_saved=step.bytes_saved + site.bytes_saved
        )
    return tuple(found.values())


def _add(covered: dict[str, Layer], layer: Layer) -> None:
    """Add a layer. One compiled repeatedly counts as its worst compile, with the steps of all."""
    known = covered.get(layer.module)
    if known is not None:
        worst = min(known, layer, key=lambda one: -STATUSES.index(one.status))
        layer = replace(
            worst,
            steps=tuple(dict.fromkeys((*known.steps, *layer.steps))),
            would=known.would and layer.would,
            serving=tuple(dict.fromkeys((*known.serving, *layer.serving))),
        )
    covered[layer.module] = layer


def _uncovered(weight: Quantized, read: Mapping[str, str]) -> Layer:
    compiled = match(weight.module, read)
    status: LayerStatus = "rejected" if compiled else "unseen"
    return Layer(
        module=weight.module,
        kind=weight.kind,
        format=weight.format,
        status=status,
        reason=read[compiled] if compiled else UNSEEN,
        shape=weight.shape,
    )


__all__ = ["BLIND", "FAILED", "UNSEEN", "beside", "layers"]
