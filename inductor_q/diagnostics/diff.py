"""Compare two observed runs: what got better or worse.

Causes are matched by what they say and the function they are in, not by line, so an edit above them
is no change. Bytes and counts compare exactly; seconds only beyond the noise of compiling twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from inductor_q.diagnostics.explanation import BESIDE, STATUSES, Explanation, Frame, Layer
from inductor_q.diagnostics.render import words
from inductor_q.diagnostics.render.tree import paths

Verdict = Literal["worse", "better", "changed"]

NOISE = 0.2  # of a phase's seconds: two cold compiles of one program differ by about half of that
NOISE_SECONDS = 0.5  # and phases this close count as equal


@dataclass(frozen=True)
class Change:
    """Describe one difference. `what` names it, `before` and `after` are its values in words."""

    verdict: Verdict
    kind: str
    what: str
    before: str
    after: str


def compare(before: Explanation, after: Explanation, *, noise: float = NOISE) -> list[Change]:
    """List every difference between two runs, the worse ones first."""
    changes = [
        *_exits(before, after),
        *_causes(before, after),
        *_layers(before.layers, after.layers),
        *(c for kind in BESIDE for c in _layers(getattr(before, kind), getattr(after, kind))),
        *_saved(before, after),
        *_seconds(before, after, noise),
        *_environment(before, after),
    ]
    return sorted(changes, key=lambda change: ("worse", "better", "changed").index(change.verdict))


def _exits(before: Explanation, after: Explanation) -> Iterator[Change]:
    said = [words.ending(run) or "ended well" for run in (before, after)]
    failed = [run.exit.status != 0 for run in (before, after)]
    if said[0] != said[1]:
        yield Change(_verdict(*failed), "exit", "the target", *said)


def _causes(before: Explanation, after: Explanation) -> Iterator[Change]:
    for kind, was, now in (
        ("graph break", _breaks(before), _breaks(after)),
        ("recompile", _recompiles(before), _recompiles(after)),
        ("left in eager mode", _fallbacks(before), _fallbacks(after)),
        ("suppressed error", _suppressed(before), _suppressed(after)),
        ("CUDA graph skipped", _skips(before), _skips(after)),
    ):
        for what, (old, new) in _pairs(was, now):
            if old != new:
                yield Change(_verdict(old, new), kind, what, f"x{old}", f"x{new}")


def _breaks(run: Explanation) -> Counter[str]:
    return _count((f"{b.reason}{_where(b.user)}", b.count) for b in run.breaks)


def _recompiles(run: Explanation) -> Counter[str]:
    return _count((f"{r.guard}{_where(r.where)}", r.count) for r in run.recompiles)


def _fallbacks(run: Explanation) -> Counter[str]:
    return _count((f"{f.reason}{_where(f.where)}", f.count) for f in run.fallbacks)


def _suppressed(run: Explanation) -> Counter[str]:
    return _count((f"{s.error}{_where(s.where)}", s.count) for s in run.suppressed)


def _skips(run: Explanation) -> Counter[str]:
    return _count((skip.reason, skip.count) for skip in run.cudagraph_skips)


def _count(items: Iterable[tuple[str, int]]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for what, count in items:
        counts[what] += count
    return counts


def _where(frame: Frame) -> str:
    """Name the place without its line."""
    return f" in {frame.function} of {PurePath(frame.file).name}" if frame.file else ""


def _layers(before: tuple[Layer, ...], after: tuple[Layer, ...]) -> Iterator[Change]:
    """Compare layers and group those that changed in the same way."""
    was, now = ({layer.module: layer for layer in layers} for layers in (before, after))
    fates: dict[tuple[Verdict, str, str], list[Layer]] = {}
    for module, known in {**was, **now}.items():
        first, second = was.get(module), now.get(module)
        said = _fate(first), _fate(second)
        verdict: Verdict = "changed"
        if first and second:
            verdict = _verdict(STATUSES.index(first.status), STATUSES.index(second.status))
        if said[0] != said[1]:
            fates.setdefault((verdict, *said), []).append(known)
    for (verdict, old_fate, new_fate), layers in fates.items():
        yield Change(verdict, "fusion", "; ".join(paths(layers)), old_fate, new_fate)


def _fate(layer: Layer | None) -> str:
    if layer is None:
        return "not there"
    return "fused" if layer.status == "fused" else words.outcome(layer)


def _saved(before: Explanation, after: Explanation) -> Iterator[Change]:
    def change(verdict: Verdict, what: str, was: int, now: int) -> Change:
        return Change(verdict, "saved for backward", what, words.size(was), words.size(now))

    was, now = before.saved_bytes, after.saved_bytes
    if was != now:
        yield change(_verdict(was, now), "in all", was, now)
    sums = [_count((s.op, s.bytes) for s in run.saved) for run in (before, after)]
    for op, (old, new) in _pairs(*sums):
        if old != new:
            yield change("changed", op, old, new)


def _seconds(before: Explanation, after: Explanation, noise: float) -> Iterator[Change]:
    was, now = ({p.name: p.seconds for p in run.phases} for run in (before, after))
    for name in (name for name in was if name in now):
        old, new = was[name], now[name]
        if abs(new - old) > max(NOISE_SECONDS, noise * old):
            said = f"{old:.1f} s", f"{new:.1f} s"
            yield Change(_verdict(old, new), "compile time", name, *said)
    cached = [sum(c.cached for c in run.compiles) for run in (before, after)]
    if cached[0] != cached[1]:
        yield Change("changed", "compile time", "graphs from a cache", *map(str, cached))


def _environment(before: Explanation, after: Explanation) -> Iterator[Change]:
    for name in {**before.environment, **after.environment}:
        was, now = (run.environment.get(name, "none") for run in (before, after))
        if was != now:
            yield Change("changed", "environment", name, was, now)


def _pairs(was: Counter[str], now: Counter[str]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield every key of either, with both values."""
    for key in {**was, **now}:
        yield key, (was[key], now[key])


def _verdict(was: float, now: float) -> Verdict:
    """Judge two numbers, of which more is worse."""
    return "worse" if now > was else "better" if now < was else "changed"
