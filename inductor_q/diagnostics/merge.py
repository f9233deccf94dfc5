"""Merge the reports of several ranks: each rank writes its own, and the last one joins them.

This takes files alone and no collective: a rank may have died, and its report matters most.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from inductor_q.diagnostics.explanation import STATUSES, Explanation, GraphBreak, Layer
from inductor_q.diagnostics.render.json import from_json, to_json
from inductor_q.exc import InvalidOptionValue
from inductor_q.files import write_whole

_POLL = 0.1
RUN = "run"  # the key of `environment` that distinguishes launches

_T = TypeVar("_T")


@dataclass(frozen=True)
class Ranks:
    """Place this process among those of a launch; `local` of them share this machine's files."""

    rank: int = 0
    world_size: int = 1
    local: int = 1
    run: str = ""

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> Ranks:
        """Read the place from torchrun's environment variables; without them, one process runs.

        Raises:
            InvalidOptionValue: one of them is no number, or the rank is none of the launch.
        """
        if "RANK" not in environ or "WORLD_SIZE" not in environ:
            return cls()
        size = _number(environ, "WORLD_SIZE")
        rank = _number(environ, "RANK", most=size - 1)
        names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
        run = "-".join(environ.get(name, "") for name in names)
        local = _number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else size
        return cls(rank, size, local, run)


def _number(environ: Mapping[str, str], name: str, most: float = math.inf) -> int:
    text = environ[name].strip()
    if text.isdecimal() and int(text) <= most:
        return int(text)
    expected = "a whole number" if most == math.inf else f"a rank below {most + 1}, the WORLD_SIZE"
    raise InvalidOptionValue(name=name, value=text, expected=expected, source="the environment")


@dataclass(frozen=True)
class Exchange:
    """Keep the reports of a launch's ranks: `FILE.rankN.json` beside the merged FILE."""

    file: Path
    ranks: Ranks

    def rank_file(self, rank: int) -> Path:
        return self.file.with_name(f"{self.file.stem}.rank{rank}.json")

    def clear(self) -> None:
        """Remove what an earlier launch left under this rank's name."""
        self.rank_file(self.ranks.rank).unlink(missing_ok=True)

    def leave(self, run: Explanation) -> None:
        """Write this rank's report."""
        run = replace(run, environment={**run.environment, RUN: self.ranks.run})
        write_whole(self.rank_file(self.ranks.rank), to_json(run))

    def collect(self, timeout: float) -> list[Explanation]:
        """Return the reports of this launch, once all are there or `timeout` seconds are over."""
        end = time.monotonic() + timeout
        while True:
            found = [*filter(None, map(self._read, range(self.ranks.world_size)))]
            if len(found) == self.ranks.world_size or time.monotonic() >= end:
                return found
            time.sleep(_POLL)

    def _read(self, rank: int) -> Explanation | None:
        path = self.rank_file(rank)
        if not path.exists():
            return None
        run = from_json(path.read_text(), path=str(path))
        return run if run.environment.get(RUN) == self.ranks.run else None


def merge(runs: Sequence[Explanation]) -> Explanation:
    """Join the ranks into one run.

    Events of all ranks are counted together; times and bytes are those of the worst rank, since
    ranks work side by side. A layer counts as its worst rank; a warning names what only some ranks
    saw.
    """
    runs = sorted(runs, key=lambda run: run.rank)
    first = runs[0]
    missing = sorted(set(range(first.world_size)) - {run.rank for run in runs})
    warnings = [f"no report of rank {rank}: it was killed, or is still running" for rank in missing]
    return replace(
        first,
        exit=next((run.exit for run in runs if run.exit.status), first.exit),
        seconds=max(run.seconds for run in runs),
        environment={k: v for k, v in first.environment.items() if k != RUN},
        compiles=_worst(runs, lambda r: r.compiles, lambda c: c.compile_id, "seconds"),
        breaks=_summed(runs, lambda r: r.breaks, _same_break),
        recompiles=_summed(runs, lambda r: r.recompiles, lambda r: (r.function, r.guard)),
        fallbacks=_summed(runs, lambda r: r.fallbacks, lambda f: (f.function, f.reason)),
        suppressed=_summed(runs, lambda r: r.suppressed, lambda s: (s.function, s.error)),
        cudagraph_skips=_summed(runs, lambda r: r.cudagraph_skips, lambda s: s.reason),
        phases=_worst(runs, lambda r: r.phases, lambda p: p.name, "seconds"),
        saved=_worst(runs, lambda r: r.saved, lambda s: s.op, "bytes"),
        layers=_layers(run.layers for run in runs),
        attention=_layers(run.attention for run in runs),
        loss=_layers(run.loss for run in runs),
        checkpointing=_layers(run.checkpointing for run in runs),
        numerics=_worst(runs, lambda r: r.numerics, lambda n: n.module, "worst"),
        memory=tuple(_said(runs, lambda run: run.memory)),
        warnings=(*warnings, *_warnings(runs)),
    )


def _worst(
    runs: Iterable[Explanation],
    records: Callable[[Explanation], Sequence[_T]],
    key: Callable[[_T], Hashable],
    size: str,
) -> tuple[_T, ...]:
    found: dict[Hashable, _T] = {}
    for run in runs:
        for record in records(run):
            known = found.get(key(record))
            if known is None or getattr(record, size) > getattr(known, size):
                found[key(record)] = record
    return tuple(found.values())


def _summed(
    runs: Iterable[Explanation],
    records: Callable[[Explanation], Sequence[_T]],
    key: Callable[[_T], Hashable],
) -> tuple[_T, ...]:
    found: dict[Hashable, Any] = {}
    for run in runs:
        for record in records(run):
            known: Any = found.get(key(record), record)
            count = known.count + record.count if known is not record else known.count  # type: ignore[attr-defined]
            found[key(record)] = replace(known, count=count)
    return tuple(found.values())


def _same_break(item: GraphBreak) -> Hashable:
    return item.gb_id, item.reason, item.origin.file, item.origin.line


def _layers(ranks: Iterable[Iterable[Layer]]) -> tuple[Layer, ...]:
    found: dict[str, Layer] = {}
    for layer in (layer for layers in ranks for layer in layers):
        known = found.get(layer.module)
        if known is None or STATUSES.index(layer.status) > STATUSES.index(known.status):
            found[layer.module] = layer
    return tuple(found.values())


def _warnings(runs: Sequence[Explanation]) -> list[str]:
    lines = _said(runs, lambda run: run.warnings)
    for item in _summed(runs, lambda r: r.breaks, _same_break):
        key = _same_break(item)
        having = [run.rank for run in runs if key in map(_same_break, run.breaks)]
        if len(having) < len(runs):
            lines.append(_of_ranks(f"graph break at {item.origin}: {item.reason}", having, runs))
    return lines


def _said(runs: Sequence[Explanation], lines: Callable[[Explanation], Sequence[str]]) -> list[str]:
    """List each line once, with the ranks that have it unless all do."""
    return [
        _of_ranks(text, [run.rank for run in runs if text in lines(run)], runs)
        for text in dict.fromkeys(line for run in runs for line in lines(run))
    ]


def _of_ranks(text: str, ranks: Sequence[int], runs: Sequence[Any]) -> str:
    if len(ranks) == len(runs):
        return text
    return f"rank {', '.join(map(str, ranks))} only: {text}"


__all__ = ["Exchange", "Ranks", "merge"]
