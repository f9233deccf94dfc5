"""Record chosen steps of a training: a trace for Chrome or Perfetto, and what the GPU allocated."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from inductor_q.exc import NoProfileSteps
from inductor_q.log import log

_MOST_EVENTS = 1_000_000  # of a memory snapshot


class StepProfile:
    """Record from the first to the last of `steps`, which count from 1, and write to `folder`.

    Raises:
        NoProfileSteps: there are none, or they are no such numbers.
    """

    def __init__(self, folder: Path, steps: Collection[int]) -> None:
        numbers = isinstance(steps, Collection) and all(isinstance(step, int) for step in steps)
        if not numbers or not steps or min(steps) < 1:
            raise NoProfileSteps(given=steps)
        self.folder = folder
        self.first, self.last = min(steps), max(steps)
        self._running: Any = None
        self._has_begun = False

    def begin(self, step: int) -> None:
        """Start where `step` is the first."""
        if step != self.first or self._running is not None:
            return
        self._has_begun = True
        self.folder.mkdir(parents=True, exist_ok=True)
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)
        self._running = profile(activities=activities, profile_memory=True)
        self._running.start()

    def end(self, step: int | None = None) -> None:
        """Stop and write where `step` is the last, or training ends before it."""
        if step is None and not self._has_begun:
            log.warning("no profile was written: step %d was not trained", self.first)
        if self._running is None or (step is not None and step < self.last):
            return
        self._running.stop()
        rank = os.environ.get("RANK", "0")
        trace = self.folder / f"trace.rank{rank}.json"
        self._running.export_chrome_trace(str(trace))
        self._running = None
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(str(self.folder / f"memory.rank{rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        log.info("steps %d to %d are in %s", self.first, self.last, trace)
