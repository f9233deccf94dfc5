"""Run a function on two ranks, each a process of its own, and end them whatever happens."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from torch.multiprocessing.spawn import ProcessContext, spawn

#: How long ranks may take once both have begun: those that wait for one another wait for ever, and
#: alone they take about a minute. Until then they import, however long a busy machine takes for it.
SECONDS = 400.0

RANKS = range(2)


def on_two_ranks(folder: Path, work: Callable[..., None], *arguments: str) -> None:
    """Call `work(rank, port, *arguments)` on ranks 0 and 1; raise what one of them raises.

    A rank that is not done in time fails the test with the stack of each thread of each rank.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        # A pool of compile workers in each rank would only compete, and may outlive its rank.
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        context = spawn(
            _rank, args=(work, str(folder), port, *arguments), nprocs=len(RANKS), join=False
        )
    assert isinstance(context, ProcessContext)
    try:
        end = None
        while not context.join(timeout=0.5):
            if end is None and all(_file(folder, rank).exists() for rank in RANKS):
                end = time.monotonic() + SECONDS
            if end is not None and time.monotonic() >= end:
                pytest.fail(
                    f"two ranks were not done in {SECONDS:g} s:\n{_stacks(context, folder)}"
                )
    finally:
        for process in context.processes:
            process.kill()  # SIGTERM would leave one that waits in a destructor
            process.join()


def _rank(rank: int, work: Callable[..., None], folder: str, *arguments: object) -> None:
    """Run in a new process, whose stacks SIGUSR1 has written to a file."""
    faulthandler.register(signal.SIGUSR1, _file(Path(folder), rank).open("w"), all_threads=True)
    work(rank, *arguments)


def leave() -> NoReturn:
    """End a rank that is done, without its destructors. Ranks with DDP were seen to hang behind
    their work (torch 2.13, gloo); which destructor waits, and for what, is not known."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _stacks(context: ProcessContext, folder: Path) -> str:
    alive = [rank for rank, process in enumerate(context.processes) if process.is_alive()]
    for rank in alive:
        os.kill(context.processes[rank].pid, signal.SIGUSR1)
    patience = time.monotonic() + 20.0
    while not all(_file(folder, rank).stat().st_size for rank in alive):
        if time.monotonic() >= patience:
            break
        time.sleep(0.5)
    time.sleep(0.5)  # a file with its first stack gets the others of its process at once
    return "\n".join(f"rank {rank}:\n{_file(folder, rank).read_text()}" for rank in RANKS)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"stacks-{rank}.txt"
