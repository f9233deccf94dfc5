"""Turn the events of a run into the records of its report."""

from __future__ import annotations

import json
import linecache
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from inductor_q.diagnostics import breaks, recompiles
from inductor_q.diagnostics.compiles import Compiled
from inductor_q.diagnostics.coverage import BLIND, FAILED
from inductor_q.diagnostics.events import Event, interned
from inductor_q.diagnostics.explanation import (
    Compile,
    CudagraphSkip,
    Fallback,
    Frame,
    GraphBreak,
    Phase,
    Recompile,
    SavedTensors,
    SuppressedError,
)
from inductor_q.graph_report import Report
from inductor_q.verdict import UNKNOWN

NO_GPU = (
    "asked for (mode='reduce-overhead' or triton.cudagraphs), and the graph runs on the CPU, which "
    "has none: leave the mode out there"
)
_LIMIT = "recompile limit"

#: Where a Trainer calls its model; TRL's trainers are made of it.
_TRAINER = "transformers/trainer.py"
_SMALLEST = 0.01  # of the longest phase: what is worth a line


@dataclass
class Run:
    """Sort the events of a run by kind. `compiled` are the graphs that reached a backend."""

    events: Sequence[Event]
    compiled: Sequence[Compiled]
    stacks: dict[str, tuple[Frame, ...]] = field(default_factory=dict)
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for event in self.events:
            if event.name == "dynamo_start":
                self.stacks[event.compile_id] = tuple(map(_frame, event.data["stack"]))
            elif event.name == "compilation_metrics":
                self.metrics[event.compile_id] = event.data

    def named(self, *names: str) -> Iterable[Event]:
        return (event for event in self.events if event.name in names)

    # --- breaks, recompiles, what fell back --------------------------------------------------

    def breaks(self) -> tuple[GraphBreak, ...]:
        """Return every break, also one that `fullgraph=True` made an error of."""
        found, told = [], set()
        for event in self.named("dynamo_graph_break_reason"):
            told.add(event.compile_id)
            found.append((event, breaks.parse(event.payload)))
        for event in self.named("dynamo_error"):
            parsed = breaks.parse_error(event.payload)
            if parsed is not None and event.compile_id not in told:
                found.append((event, parsed))
        return breaks.distinct(
            breaks.graph_break(
                parsed,
                compile_id=event.compile_id,
                outer=self.stacks.get(event.compile_id, ()),
            )
            for event, parsed in found
        )

    def recompiles(self) -> tuple[Recompile, ...]:
        found = []
        for event in self.named("recompile_reasons"):
            guard = recompiles.parse(recompiles.first_reason(event.payload), event.note or "")
            function, where = self._function(event.compile_id)
            found.append((function, where, guard, event.compile_id not in self.stacks))
        return recompiles.distinct(found, by_trainer=self._has_trainer())

    def _has_trainer(self) -> bool:
        """Whether a Trainer calls what is compiled."""
        files = {frame.file for stack in self.stacks.values() for frame in stack}
        return any(file.replace("\\", "/").endswith(_TRAINER) for file in files)

    def fallbacks(self) -> tuple[Fallback, ...]:
        """Return frames that torch gave up: a break that it could not resume, or too many
        recompiles.
        """
        broken = {e.compile_id for e in self.named("dynamo_graph_break_reason")}
        count: Counter[tuple[str, Frame, str]] = Counter()
        for one, data in self.metrics.items():
            reason = str(data.get("fail_reason") or "")
            if _LIMIT in reason:
                count[(*self._function(one), f"the {_LIMIT} was reached")] += 1
            elif data.get("fail_type") == "Unsupported" and one in broken:
                title = breaks.parse(reason).title
                count[(*self._function(one), f"a graph break that cannot be resumed: {title}")] += 1
        return tuple(Fallback(f, w, r, n) for (f, w, r), n in count.items())

    def suppressed(self) -> tuple[SuppressedError, ...]:
        count: Counter[tuple[str, Frame, str]] = Counter()
        for one, data in self.metrics.items():
            error = self._failure(one)
            if error and data.get("config_suppress_errors"):
                count[(*self._function(one), error)] += 1
        return tuple(SuppressedError(f, w, e, n) for (f, w, e), n in count.items())

    def cudagraph_skips(self) -> tuple[CudagraphSkip, ...]:
        """Return why torch skipped CUDA graphs; it logs a reason only for graphs on a GPU."""
        count = sum(one.wants_cudagraphs for one in self.compiled)
        return (CudagraphSkip(NO_GPU, count),) if count else ()

    # --- compiles ----------------------------------------------------------------------------

    def compiles(self) -> tuple[Compile, ...]:
        backward: dict[str, float] = defaultdict(float)
        for event in self.named("bwd_compilation_metrics"):
            backward[event.compile_id] += (event.data.get("duration_us") or 0) / 1e6
        cached = {e.compile_id for e in self.named("fx_graph_cache_hit", "aotautograd_cache_hit")}
        found = {}
        for one in self.compiled:
            if self._failure(one.compile_id):
                continue
            data = self.metrics.get(one.compile_id, {})
            function, where = self._function(one.compile_id)
            forward = data.get("entire_frame_compile_time_s") or 0.0
            found[one.compile_id] = Compile(
                compile_id=one.compile_id,
                function=function,
                where=where,
                backend=one.backend,
                ops=data.get("graph_op_count") or 0,
                seconds=forward + backward[one.compile_id],
                cached=one.compile_id in cached,
                stack=_printed(self.stacks.get(one.compile_id, ())),
                observed=one.observed,
            )
        return tuple(found.values())

    def phases(self) -> tuple[Phase, ...]:
        """Return torch's own timings, begin and end paired within a thread."""
        begun: dict[tuple[Any, str], list[float]] = defaultdict(list)
        seconds: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        for event in self.named("chromium_event"):
            data = json.loads(event.payload)
            name, key = data["name"], (data.get("tid"), data["name"])
            if data["ph"] == "B":
                begun[key].append(data["ts"])
            elif data["ph"] == "E" and begun[key]:
                seconds[name] += (data["ts"] - begun[key].pop()) / 1e6
                calls[name] += 1
        least = _SMALLEST * max(seconds.values(), default=0.0)
        return tuple(
            Phase(name, round(time, 6), calls[name])
            for name, time in seconds.most_common()
            if time >= least
        )

    def saved(self) -> tuple[SavedTensors, ...]:
        """Return what one step keeps for backward.

        The compiles of one function replace each other, so the largest counts.
        """
        largest: dict[str, tuple[SavedTensors, ...]] = {}
        for one in self.compiled:
            frame = one.compile_id.rpartition("/")[0]
            largest[frame] = max(one.saved, largest.get(frame, ()), key=_bytes)
        count: Counter[str] = Counter()
        size: Counter[str] = Counter()
        for kept in largest.values():
            for item in kept:
                count[item.op] += item.count
                size[item.op] += item.bytes
        return tuple(SavedTensors(op, count[op], n) for op, n in size.most_common())

    # --- coverage ----------------------------------------------------------------------------

    def reports(self) -> list[tuple[Report, bool]]:
        """Return the passes' reports, with True for those of dry runs."""
        own = {e.compile_id: e.payload for e in self.named("qfuse_report")}
        found = [(Report.from_dict(json.loads(text)), False) for text in own.values()]
        return found + [(one.report, True) for one in self.compiled if one.report is not None]

    def options(self) -> dict[str, dict[str, str]]:
        """Return the options of the latest compile by qfuse, or of what it would have been."""
        reports = self.reports()
        latest = reports[-1][0].options if reports else {}
        return {key: {k: str(v) for k, v in entry.items()} for key, entry in latest.items()}

    def read(self) -> dict[str, str]:
        """Map each module whose parameters some compiled graph reads to a reason.

        The reason says why a layer in the module may have no site of a pass.
        """
        found: dict[str, str] = {}
        for one in self.compiled:
            reason = UNKNOWN if one.observed else BLIND.format(one.backend)
            if failure := self._failure(one.compile_id):
                reason = FAILED.format(failure)
            for path in filter(None, one.read):
                found[path] = reason if found.get(path) != UNKNOWN else UNKNOWN
        return found

    # --- what could not be seen --------------------------------------------------------------

    def warnings(self, forced: str) -> list[str]:
        if not self.compiled:
            return [_nothing_compiled(forced, broken=bool(self.stacks))]
        blind: dict[str, list[str]] = defaultdict(list)
        for one in self.compiled:
            ours = one.backend == "qfuse"  # says so in its report where it leaves a graph as it is
            if not one.observed and not ours and not self._failure(one.compile_id):
                blind[one.backend].append(one.compile_id)
        return [
            f"backend {backend!r} ({', '.join(ids[:4])}{', ...' if len(ids) > 4 else ''}) compiled "
            "without Inductor's joint passes: its fusion coverage and what it saves for backward "
            "cannot be seen (--backend qfuse shows them)"
            for backend, ids in blind.items()
        ]

    def _failure(self, compile_id: str) -> str:
        """Return the error that ended a compile; "" where none did, or where a break ended it."""
        data = self.metrics.get(compile_id, {})
        kind = data.get("fail_type")
        if not kind or kind == "Unsupported" or _LIMIT in str(data.get("fail_reason")):
            return ""
        # "backend='inductor' raised:" and, on the next line, what it raised
        lines = str(data.get("fail_reason") or "").strip().splitlines()[:2]
        return ": ".join([str(kind), " ".join(lines)]) if lines else str(kind)

    def _function(self, compile_id: str) -> tuple[str, Frame]:
        """Return the name of the function that a compile is about, and where it is defined."""
        frame = compile_id.rpartition("/")[0]
        for one, data in self.metrics.items():
            if one.rpartition("/")[0] == frame and data.get("co_name"):
                file, line = data.get("co_filename") or "", data.get("co_firstlineno") or 0
                name = breaks.function_name(data["co_name"])
                text = linecache.getline(file, line).strip()
                return name, Frame(file, line, name, text)
        stack = self.stacks.get(compile_id) or self.stacks.get(f"{frame}/0") or (Frame(),)
        return stack[-1].function, stack[-1]


def _nothing_compiled(forced: str, *, broken: bool) -> str:
    if broken:
        return "torch.compile was called, but no graph reached a backend: see the breaks"
    force = (
        f" (--backend {forced} chooses who compiles; it compiles nothing by itself)"
        if forced
        else ""
    )
    how = 'wrap the model: model = torch.compile(model, backend="qfuse")'
    if "transformers.trainer" in sys.modules:
        how = (
            "give its Trainer callbacks=[inductor_q.integrations.QfuseCallback()], or start the "
            "script by qfuse run, which does; in a loop of its own " + how
        )
    never = "nothing was compiled: the target never calls a function made by torch.compile"
    return f"{never}; {how}{force}"


def _frame(entry: dict[str, Any]) -> Frame:
    file, line = interned(entry["filename"]), int(entry.get("line") or 0)
    name = breaks.function_name(entry.get("name") or "")
    return Frame(file, line, name, linecache.getline(file, line).strip())


def _printed(stack: Sequence[Frame]) -> str:
    lines = []
    for frame in stack:
        lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
        if frame.text:
            lines.append(f"    {frame.text}")
    return "\n".join(lines)


def _bytes(saved: Sequence[SavedTensors]) -> int:
    return sum(item.bytes for item in saved)


__all__ = ["Run"]
