"""Have the machine alone while something is measured, among commands that run side by side.

`benchmarks.together` starts the commands, each in a process group of its own, and names a folder in
the environment that holds a file for each group. Without it nothing here does anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

FOLDER = "INDUCTOR_Q_BENCHMARKS_TOGETHER"
LOCK = "lock"  # a file of that folder, which is locked while something is measured

#: What a process had queued on a device when it was stopped is computed by then.
DRAIN_SECONDS = 0.2

_depth = 0


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Stop the other commands' processes until this ends; wait first for one that measures."""
    global _depth
    folder = os.environ.get(FOLDER)
    if folder is None or _depth:
        yield
        return
    with Path(folder, LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _depth += 1
        others = groups(Path(folder)) - {os.getpgrp()}
        signal_groups(others, signal.SIGSTOP)
        try:
            time.sleep(DRAIN_SECONDS)
            yield
        finally:
            _depth -= 1
            # Before the lock is free: else one that is still stopped could get it.
            signal_groups(others, signal.SIGCONT)


def groups(folder: Path) -> set[int]:
    """Return the process groups of the commands that run."""
    return {int(file.stem) for file in folder.glob("*.group")}


def signal_groups(groups: set[int], number: signal.Signals) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError):  # ended since it was read
            os.killpg(group, number)
