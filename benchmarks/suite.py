"""Hold the rows of one benchmark run, and print them as a table or as JSON."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import origin
from benchmarks.measure import Ceilings, Timing
from benchmarks.place import load, machine, versions

SCHEMA = 1

console = Console(width=None if sys.stdout.isatty() else 160)


def heading(benchmark: str, device: torch.device, commit: dict[str, Any]) -> dict[str, Any]:
    """Return what every result begins with: what ran, where, of which commit, and when."""
    return {
        "schema": SCHEMA,
        "benchmark": benchmark,
        "device": device.type,
        "machine": machine(device),
        "versions": versions(),
        "commit": commit,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


@dataclass
class Row:
    """Hold one peer on one case.

    ``roof`` is in seconds; ``extra`` holds what only some benchmarks have.
    """

    case: dict[str, Any]
    peer: str
    timing: Timing
    roof: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Suite:
    """Hold the rows of one benchmark run, and where they were measured."""

    name: str
    device: torch.device
    ceilings: Ceilings
    settings: dict[str, Any] = field(default_factory=dict)
    statistic: str = "median"  # what tables and ratios show: a field of Timing
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: Taken when the run starts: a file edited meanwhile is not what runs.
    commit: dict[str, Any] = field(default_factory=origin.commit)

    def add(
        self,
        case: Mapping[str, Any],
        timings: Mapping[str, Timing],
        *,
        roof: float | None = None,
        extra: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        for peer, timing in timings.items():
            values = dict((extra or {}).get(peer, {}))
            self.rows.append(Row(dict(case), peer, timing, roof, values))

    def cases(self) -> list[dict[str, Any]]:
        return list({json.dumps(row.case): row.case for row in self.rows}.values())

    def peers(self) -> list[str]:
        return list(dict.fromkeys(row.peer for row in self.rows))

    def find(self, case: Mapping[str, Any], peer: str) -> Row | None:
        return next((r for r in self.rows if r.case == case and r.peer == peer), None)

    def ratio(self, case: Mapping[str, Any], peer: str, to: str) -> float | None:
        """Divide the time of ``peer`` by that of ``to``: below 1 is faster."""
        one, other = self.find(case, peer), self.find(case, to)
        if one is None or other is None:
            return None
        return self.seconds(one) / self.seconds(other)

    def seconds(self, row: Row) -> float:
        value: float = getattr(row.timing, self.statistic)
        return value

    def as_dict(self) -> dict[str, Any]:
        rows = []
        for row in self.rows:
            entry = asdict(row)
            entry["roof_fraction"] = row.roof / self.seconds(row) if row.roof else None
            entry["ratio_to"] = {
                peer: self.ratio(row.case, row.peer, peer)
                for peer in self.peers()
                if peer != row.peer and self.find(row.case, peer) is not None
            }
            rows.append(entry)
        return {
            **heading(self.name, self.device, self.commit),
            "load": load(),
            "ceilings": asdict(self.ceilings),
            "settings": {**self.settings, "statistic": self.statistic},
            "rows": rows,
            "notes": self.notes,
        }

    def save(self, path: Path) -> Path:
        return origin.write(self.as_dict(), path)

    def table(self, *, extras: Sequence[str] = ()) -> Table:
        """Make one row per case, one column per peer with its share of the roof, then ratios of
        qfuse.
        """
        table = Table(title=f"{self.name} on {machine(self.device)['name']}", title_justify="left")
        cases, peers = self.cases(), self.peers()
        for key in cases[0] if cases else ():
            table.add_column(str(key))
        roofed = any(row.roof for row in self.rows)
        if roofed:
            table.add_column("roof", justify="right")
        for peer in peers:
            table.add_column(escape(peer), justify="right")
        against = [p for p in peers if p != "qfuse"] if "qfuse" in peers else []
        for peer in against:
            table.add_column(f"qfuse / {escape(peer)}", justify="right")
        for case in cases:
            cells = [str(value) for value in case.values()]
            found = {peer: self.find(case, peer) for peer in peers}
            if roofed:
                roof = next((row.roof for row in found.values() if row and row.roof), None)
                cells.append(duration(roof) if roof else "")
            cells += [self._cell(row, extras) if row else "" for row in found.values()]
            for peer in against:
                ratio = self.ratio(case, "qfuse", peer)
                cells.append("" if ratio is None else f"{ratio:.2f}")
            table.add_row(*cells)
        return table

    def _cell(self, row: Row, extras: Sequence[str]) -> str:
        text = duration(self.seconds(row))
        if row.roof:
            text += f" ({100 * row.roof / self.seconds(row):.0f}%)"
        for key in extras:
            if row.extra.get(key) is not None:
                text += f"\n{_labelled(key, row.extra[key])}"
        return text


def _labelled(key: str, value: Any) -> str:
    if key.endswith("_bytes"):
        return f"{key.removesuffix('_bytes')} {size(value)}"
    if key.endswith("_s"):
        return f"{key.removesuffix('_s')} {duration(value)}"
    return f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"


def duration(seconds: float) -> str:
    """Write three or four digits and a unit: 37.1 us, 71.8 ms, 12.3 s."""
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds * scale < 1000:
            return f"{seconds * scale:.4g} {unit}"
    return f"{seconds:.3g} s"


def size(count: float) -> str:
    """Write bytes with a unit, in powers of ten."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"
