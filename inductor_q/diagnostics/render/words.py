"""The words that text, HTML and annotations share: counts, sizes, places, the summary line."""

from __future__ import annotations

import os
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from inductor_q.diagnostics.explanation import (
    BESIDE,
    Explanation,
    Frame,
    Layer,
    Recompile,
    Serving,
    Step,
)

#: The way out of every suppressed error.
UNSUPPRESS = (
    "torch._dynamo.config.suppress_errors turned this into eager execution: set it to False (and "
    "unset TORCHDYNAMO_SUPPRESS_ERRORS), and it raises"
)

_STOOD_BACK = {
    "attention": "still masked",
    "loss": "left whole",
    "checkpointing": "computed again",
}

_DONE = {
    "attention": "without a mask",
    "loss": "in chunks",
    "checkpointing": "kept",
}

_INSTALLED = re.compile(r".*[\\/](?:site|dist)-packages[\\/]")


def plural(count: int, noun: str) -> str:
    """Count things in words: 1 break, 2 breaks, no breaks."""
    return f"{count or 'no'} {noun if count == 1 else noun + 's'}"


def size(count: float) -> str:
    """Give bytes in the largest unit of which there is one."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def short(file: str) -> str:
    """Shorten a path to start at the working directory, or inside the installed packages."""
    if found := _INSTALLED.match(file):
        return file[found.end() :]
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return file


def place(frame: Frame) -> str:
    """Write file:line in function, the file as `short` has it."""
    if not frame.file:
        return ""
    line = f":{frame.line}" if frame.line else ""
    return f"{short(frame.file)}{line}" + (f" in {frame.function}" if frame.function else "")


def command(run: Explanation) -> str:
    """Write the target as it was called, and in how many processes."""
    called = " ".join([run.target, *map(shlex.quote, run.argv)])
    return f"{called} ({run.world_size} ranks)" if run.world_size > 1 else called


def ending(run: Explanation) -> str:
    """Say how the target ended; empty where it ended well."""
    if run.exit.signal:
        return f"the target was ended by {run.exit.signal}"
    if run.exit.exception:
        return f"the target raised {run.exit.exception}"
    return f"the target exited with status {run.exit.status}" if run.exit.status else ""


def coverage(run: Explanation) -> str:
    """Say how many quantized layers are fused and how many left to their library, or would be."""
    return _share(run.layers, "quantized layer", "fused")


def beside(run: Explanation) -> list[tuple[str, str, Sequence[Layer]]]:
    """List kind, title and records of what is told beside quantized layers."""
    said = {
        "attention": ("mask", "left out"),
        "loss": ("head", "computed in chunks"),
        "checkpointing": ("part", "kept, of layers that backward computes again"),
    }
    return [
        (kind, f"{kind.capitalize()}: {_share(records, *said[kind])}", records)
        for kind in BESIDE
        if (records := getattr(run, kind))
    ]


def _share(layers: Sequence[Layer], noun: str, done: str) -> str:
    fused = sum(layer.status == "fused" for layer in layers)
    would = "would be " if any(layer.would for layer in layers) else ""
    return f"{fused} of {plural(len(layers), noun)} {would}{done}{left(layers)}"


def left(layers: Sequence[Layer]) -> str:
    """Say how many layers a threshold leaves to their library; "" where there are none.

    The text stands after the fused ones.
    """
    count = sum(layer.status == "left" for layer in layers)
    return f", {count} left to {'its' if count == 1 else 'their'} library" if count else ""


def causes(count: int, distinct: int, noun: str) -> str:
    """Count events and their causes: 3 breaks, or 3 breaks of 2 causes."""
    return plural(count, noun) + (f" ({distinct} distinct)" if distinct not in (0, count) else "")


def summary(run: Explanation) -> str:
    """Sum up the run in one line, the worst first."""
    if not (run.compiles or run.breaks or run.fallbacks or run.suppressed):
        return "nothing was compiled"
    parts = [
        causes(run.break_count, len(run.breaks), "graph break"),
        causes(run.recompile_count, len(run.recompiles), "recompile"),
    ]
    if run.fallbacks:
        parts.append(f"{plural(sum(f.count for f in run.fallbacks), 'frame')} left in eager mode")
    if run.suppressed:
        parts.append(plural(sum(s.count for s in run.suppressed), "suppressed error"))
    if run.layers:
        parts.append(coverage(run))
    if run.saved_bytes:
        parts.append(f"{size(run.saved_bytes)} saved for backward")
    return ", ".join(parts)


def failed_guard(recompile: Recompile) -> str:
    """Write the guard with the values it saw, unless its own words name them."""
    values = (recompile.before, recompile.after)
    if not recompile.after or all(value in recompile.guard for value in values):
        return recompile.guard
    return f"{recompile.guard}: {' -> '.join(values)}"


def outcome(layer: Layer) -> str:
    """Say in words what became of a layer."""
    if layer.status == "fused":
        return fused_by([layer])
    said = {
        "left": "would be left to its library" if layer.would else "left to its library",
        "canonical": _STOOD_BACK.get(layer.kind, "recognized, not fused"),
        "rejected": "not fused",
        "unseen": "in no compiled graph",
    }[layer.status]
    return f"{said}: {layer.reason}" if layer.reason else said


def packed(layers: Sequence[Layer]) -> list[tuple[str, str, str]]:
    """List how weights are packed, and who computes with them at what cost.

    One row has: whose format; of how many layers, and the name of its layout; who serves, and the
    bytes of all these weights that a product with each moves.
    """
    groups: dict[tuple[object, ...], list[Layer]] = {}
    for layer in (layer for layer in layers if layer.serving):
        who = tuple((one.op, one.provider, one.passed_over) for one in layer.serving)
        groups.setdefault((layer.library, layer.format, layer.layout, who), []).append(layer)
    rows = []
    for alike in groups.values():
        first = alike[0]
        layout = f", {first.layout}" if first.layout else ""
        ways = zip(*(layer.serving for layer in alike), strict=True)
        served = "; ".join(serves(_added(way)) for way in ways)
        what = f"{first.library} {first.format}".strip()
        rows.append((what, f"{plural(len(alike), 'layer')}{layout}", served))
    return rows


def _added(of: Sequence[Serving]) -> Serving:
    """Add up the bytes of what is served alike."""
    packed, written = sum(one.packed for one in of), sum(one.written for one in of)
    return replace(of[0], packed=packed, written=written)


def serves(serving: Serving) -> str:
    """Say in words who computes with packed weights, and what that moves through memory."""
    if not serving.op:
        return f"left to {serving.provider or 'its library'}"
    bits = 8 if serving.op == "requantize" else 16
    how = f"decodes to {bits} bits" if serving.written else "reads it packed"
    cost = f": {size(serving.packed)}" if serving.packed else ""
    if cost and serving.written:
        cost += f", and {size(serving.written)} written and read again"
    against = f" (not {'; not '.join(serving.passed_over)})" if serving.passed_over else ""
    return f"{serving.provider} {how}{cost}{against}"


def done(layer: Layer) -> str:
    """Say in a word what came out well of a layer of this kind."""
    return _DONE.get(layer.kind, "fused")


def fused_by(layers: Sequence[Layer]) -> str:
    """List the passes that rewrote fused layers.

    A provider stands beside a pass where it is not torch's own, and the number of layers where it
    was not all of them.
    """
    counts: Counter[str] = Counter()
    for layer in layers:
        counts.update(
            dict.fromkeys(map(_applied, filter(lambda s: not s.rejected, layer.steps)), 1)
        )
    named = [name if n == len(layers) else f"{name} in {n}" for name, n in counts.items()]
    kept = "kept" if layers[0].kind == "checkpointing" else "fused"
    said = f"would be {kept}" if layers[0].would else kept
    return f"{said} by {', '.join(named)}" if named else said


def _applied(step: Step) -> str:
    own = f" ({step.provider})" if step.provider not in ("", "aten") else ""
    return f"{step.pass_name}{own}"


def refusals(run: Explanation) -> list[tuple[str, str, int]]:
    """List passes that stood back, where no layer says so: pass, reason, at how many layers.

    Reasons that differ only in a number (of rows, say) count as one, in the words that came first.
    """
    found: dict[tuple[str, str], tuple[str, set[str]]] = {}
    for layer in run.layers:
        for step in layer.steps:
            if step.rejected and step.rejected != layer.reason:
                key = step.pass_name, re.sub(r"\d+", "0", step.rejected)
                found.setdefault(key, (step.rejected, set()))[1].add(layer.module)
    return [(name, reason, len(at)) for (name, _), (reason, at) in found.items()]


#: A layer stands out whose error is so many times the median layer's.
STANDS_OUT = 1.5


def numerics(run: Explanation) -> str:
    """Say what the errors of eight bits are relative to, and how large the median one is."""
    middle = statistics.median(layer.worst for layer in run.numerics) if run.numerics else 0.0
    return f"Error of products in eight bits, of their norm: {middle:.2%} in the median layer"


def errors(run: Explanation) -> list[tuple[str, ...]]:
    """List layers with their errors, forward and in backward where there is a product."""

    def said(error: float, of: str) -> str:
        return f"{error:.2%} {of}" if error else ""

    return [
        (layer.module, said(layer.forward, "forward"), said(layer.backward, "backward"))
        for layer in run.numerics
    ]


def exclusion(run: Explanation) -> str:
    """Say which layers to leave in 16 bits: those that stand out."""
    if not run.numerics:
        return ""
    least = STANDS_OUT * statistics.median(layer.worst for layer in run.numerics)
    named = ",".join(layer.module for layer in run.numerics if layer.worst > least)
    if not named:
        return f"no layer stands out: none has {STANDS_OUT} times the median error"
    return f'the layers that stand out stay in 16 bits by "qfuse.compute.exclude": "{named}"'


def options(run: Explanation) -> list[tuple[str, str, str]]:
    """List name, value and source of the options that were set, not those left as they are."""
    listed = ((k, o.get("value", ""), o.get("source", "")) for k, o in sorted(run.options.items()))
    return [row for row in listed if row[2] != "default"]


def environment(run: Explanation) -> str:
    """Write versions and device in one line."""
    return ", ".join(f"{name} {value}" for name, value in run.environment.items())


def numbers(indices: Sequence[int]) -> str:
    """Write ascending indices as ranges: 0-3, 5."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def repository_path(file: str) -> str:
    """Return a path from the root of the checkout (GitHub's workspace); empty outside of it."""
    root = Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd()).resolve()
    path = Path(file).resolve()
    inside = path.is_relative_to(root) and not _INSTALLED.match(file)
    return path.relative_to(root).as_posix() if inside else ""
