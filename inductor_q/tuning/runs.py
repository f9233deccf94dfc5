"""Remember runs in a file that only grows, so that a killed sweep goes on where it was.

A line is one finished run and its key: the place, the sources of ours, the model, the steps. A line
that was cut short by a kill, or damaged, is none.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

from inductor_q.exc import UnusableRuns


@dataclass(frozen=True, kw_only=True)
class Run:
    """Record one run of one condition, in a process of its own."""

    condition: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    round: int = 1
    seconds: tuple[float, ...] = ()  # of each step but the first, between two steps' ends
    losses: tuple[float, ...] = ()
    compile_s: float = 0.0
    cold: bool = True  # whether it compiled with empty caches
    peak: int = 0  # bytes
    allocated: int = 0  # most bytes that tensors took, on a GPU; without the pools of CUDA graphs
    memory: int = 0  # bytes of the device; 0 on a CPU, where it is not asked for
    skips: int = 0  # graphs that torch kept out of CUDA graphs
    sites: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # done, not done by choice
    providers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # op -> who, how often
    sizes: Mapping[str, int] = field(default_factory=dict)  # rows, positions, logits of a step
    wall_s: float = 0.0  # of the whole process
    error: str = ""  # why there is no measurement

    @property
    def step_s(self) -> float:
        """The median of the last half of the steps."""
        return statistics.median(self.seconds[len(self.seconds) // 2 :])

    def applied(self, pass_name: str) -> int:
        return self.sites.get(pass_name, (0, 0))[0]


@dataclass(frozen=True)
class Runs:
    """Read and write the runs of one key in a file."""

    path: Path
    key: Mapping[str, Any]

    def read(self) -> list[Run]:
        """Return the finished runs of this key since it was last begun anew. The file is made if it
        is missing, since a sweep should not find out after its first run that it cannot be.

        Raises:
            UnusableRuns: it cannot be read or written.
        """
        found: list[Run] = []
        for line in self._lines():
            if line.get("key") != self.key:
                continue
            if "run" in line:
                found += _run(line["run"])
            else:
                found.clear()
        return found

    def append(self, run: Run) -> None:
        self._write({"key": self.key, "run": asdict(run)})

    def begin_anew(self) -> None:
        """Have earlier runs of this key count no more. They stay in the file."""
        self._write({"key": self.key})

    def _lines(self) -> list[dict[str, Any]]:
        with self._open() as file:
            file.seek(0)
            lines = file.read().splitlines()
        return [line for text in lines if (line := _parsed(text))]

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._open() as file:
            file.seek(0, os.SEEK_END)
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a kill has cut the last line short
                    file.write(b"\n")
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    @contextlib.contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                yield file
        except OSError as error:
            problem = error.strerror or str(error)
            raise UnusableRuns(path=str(self.path), problem=problem) from None


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return line if isinstance(line, dict) else {}


def _run(data: Any) -> list[Run]:
    """Return the run that a line holds; nothing where it is damaged."""
    try:
        known = {f.name: data[f.name] for f in fields(Run) if f.name in data}
        for name in ("seconds", "losses"):
            known[name] = tuple(map(float, known.get(name, ())))
        for name in ("round", "peak", "allocated", "memory", "skips"):
            known[name] = int(known.get(name, 0))
        for name in ("compile_s", "wall_s"):
            known[name] = float(known.get(name, 0))
        for name in ("changes", "providers", "sizes"):
            known[name] = dict(known.get(name, {}))
        known["sites"] = {name: (n, m) for name, (n, m) in known.get("sites", {}).items()}
        run = Run(**known)
    except (TypeError, ValueError, AttributeError):
        return []
    return [run] if run.seconds or run.error else []
