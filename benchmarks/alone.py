"""Have the machine alone while something is measured, among commands that run side by side.

Whatever starts the commands gives each a process group of its own, and names a folder in the
environment that holds a file for each group. Without that folder nothing is stopped.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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
            fcntl.flock(lock, fcntl.LOCK_UN)  # a process that was forked meanwhile has it open


def start(
    folder: Path, command: Sequence[str], *, env: Mapping[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    """Start a command that the others stop while they measure; nobody measures meanwhile."""
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        env = {**env, FOLDER: str(folder)}
        process = subprocess.Popen(command, env=env, start_new_session=True, **options)
        (folder / f"{process.pid}.group").write_text(str(os.getpgrp()))
    return process


def end(folder: Path, process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a command, and of the commands that it has started in this way."""
    _forget(folder, process.pid)
    process.wait()
    wake(folder)


def _forget(folder: Path, group: int) -> None:
    signal_groups({group}, signal.SIGKILL)
    (folder / f"{group}.group").unlink(missing_ok=True)
    for file in folder.glob("*.group"):
        with contextlib.suppress(FileNotFoundError):  # ended since it was listed
            if file.read_text() == str(group):
                _forget(folder, int(file.stem))


def wake(folder: Path) -> None:
    """Let all commands go on unless one measures: it may have died with the others stopped."""
    with (folder / LOCK).open("w") as lock, contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        signal_groups(groups(folder), signal.SIGCONT)


def groups(folder: Path) -> set[int]:
    """Return the process groups of the commands that run."""
    return {int(file.stem) for file in folder.glob("*.group")}


def signal_groups(groups: set[int], number: signal.Signals) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError):  # ended since it was read
            os.killpg(group, number)
