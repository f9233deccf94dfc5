"""Start one run in a process of its own, with its condition in the environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from inductor_q.own_options import OPTIONS
from inductor_q.presets import THRESHOLDS, Entry, Preset, tuned
from inductor_q.tuning.plan import EAGER, KERNELS, STOCK, Condition
from inductor_q.tuning.runs import Run
from inductor_q.tuning.sweep import OutOfBudget

#: Variables of options that each run has by its preset; the user's would be in force instead.
BY_PRESET = tuple(
    OPTIONS[name].variable for name in ("qfuse.preset", "qfuse.thresholds", "qfuse.kernels")
)


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the user's variables of our options that hold in every run, where no condition sets
    another value: what is measured holds under these alone."""
    ours = {option.variable for option in OPTIONS.values()}.difference(BY_PRESET)
    return {name: environ[name] for name in sorted(ours & {*environ}) if environ[name].strip()}


@dataclass(frozen=True)
class Launcher:
    """Measure conditions of one model, over the preset that ships. Caches and logs go to `work`:
    a condition's first run there compiles with empty caches. Each run is a process of `module`. It
    has `variables` beside those of its condition, and `start` starts it, as Popen does."""

    model: str
    steps: int
    place: tuned.Place
    preset: Preset
    work: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    module: str = "inductor_q.tuning.trial"
    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen

    def __call__(self, condition: Condition, number: int, seconds: float) -> Run:
        """Run the condition.

        Raises:
            OutOfBudget: it took longer than `seconds`.
        """
        folder = self._folder(condition)
        cold = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        out = folder / f"run{number}.json"
        command = [sys.executable, "-m", self.module, "--model", self.model]
        command += ["--steps", str(self.steps), "--out", str(out)]
        command += ["--stock"] if condition == STOCK else []
        log = self.log(condition, number)
        started = time.monotonic()
        with log.open("wb") as file:
            process = self.start(
                command,
                env=self.environment(condition, folder),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                raise OutOfBudget from None
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        wall = time.monotonic() - started
        run = Run(
            condition=condition.name,
            changes=dict(condition.changes),
            round=number,
            cold=cold,
            wall_s=wall,
        )
        if status or not out.exists():
            return replace(run, error=f"exit status {status}: {_last_line(log)}")
        return replace(run, **json.loads(out.read_text()))

    def log(self, condition: Condition, number: int) -> Path:
        """Return the file of what a run prints."""
        return self._folder(condition) / f"run{number}.log"

    def _folder(self, condition: Condition) -> Path:
        return self.work / re.sub(r"\W+", "-", condition.name)

    def environment(self, condition: Condition, folder: Path) -> dict[str, str]:
        """Return the variables under which a process has the condition, and caches of its own."""
        variables = {name: text for name, text in os.environ.items() if name not in BY_PRESET}
        variables |= {
            **self.variables,
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
            "TRITON_CACHE_DIR": str(folder / "cache" / "triton"),
            "QFUSE_PRESET": self.preset.name,
            "TORCH_COMPILE_DISABLE": str(int(condition == EAGER)),
        }
        ours = {name: x for name, x in condition.changes.items() if name in OPTIONS}
        variables |= {OPTIONS[name].variable: str(value) for name, value in ours.items()}
        if len(ours) < len(condition.changes):
            path = folder / "preset.json"
            preset = changed(self.preset, condition, evidence="is tried")
            tuned.write(path, self.place, preset, base=self.preset.name)
            variables["QFUSE_PRESET"] = str(path)
        return variables


def changed(preset: Preset, condition: Condition, *, evidence: str) -> Preset:
    """Return a preset with the changes of a condition, but for options of ours."""
    entries = {
        name: Entry(value=value, evidence=evidence)
        for name, value in condition.changes.items()
        if name not in OPTIONS
    }
    thresholds = {name: entry for name, entry in entries.items() if name in THRESHOLDS}
    kernels = {name: entry for name, entry in entries.items() if name.startswith(KERNELS)}
    others = set(entries) - set(thresholds) - set(kernels)
    return replace(
        preset,
        thresholds={**preset.thresholds, **thresholds},
        kernels={name.removeprefix(KERNELS): entry for name, entry in kernels.items()},
        options={name: entries[name] for name in entries if name in others},
    )


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines()]
    said = [line for line in lines if line]
    errors = [line for line in said if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    return (errors or said or ["it said nothing"])[-1][:300]
