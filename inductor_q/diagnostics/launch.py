"""Run one target under observation, report, and end as the target ended."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import tempfile
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from errno import EISDIR
from pathlib import Path
from types import FrameType
from typing import NoReturn

from inductor_q.diagnostics.budgets import Budget
from inductor_q.diagnostics.explanation import Exit, Explanation
from inductor_q.diagnostics.merge import Exchange, Ranks, merge
from inductor_q.diagnostics.observation import Observation, observe
from inductor_q.diagnostics.targets import Target
from inductor_q.diagnostics.torchrun import LAUNCHERS, explained_ranks
from inductor_q.exc import UnwritableOutput
from inductor_q.files import check_writable, write_whole

_PATIENCE = 20.0  # seconds that rank 0 waits for the other ranks' reports

BUDGET_MISSED = 1


def explain(args: Namespace) -> int:
    """Run `qfuse explain` and return the exit status of the process."""
    if args.module is not None:
        args.target = ["-m", *args.module]
    for name in ("json", "html", "dump"):
        if getattr(args, name):
            setattr(args, name, str(checked_output(f"--{name}", getattr(args, name))))
    if args.target[1:2] and args.target[1] in LAUNCHERS and args.target[0] == "-m":
        return Target.parse(explained_ranks(args.target, args)).run().status
    target = Target.parse(args.target, inputs=args.inputs)
    ranks = Ranks.here()
    reporter = Reporter(args, ranks)
    with observe(
        target=str(target),
        argv=target.args,
        backend=args.backend,
        dump=reporter.dump,
        whole_process=True,
        numerics=args.numerics,
    ) as observation:
        observation.rank, observation.world_size = ranks.rank, ranks.world_size
        with _on_sigterm(lambda: reporter.report(observation, Exit(143, "", "SIGTERM"))):
            ended = target.run(at_end=observation.close)
    with _sigterm_later():
        missed = reporter.report(observation, ended)
    if ended.signal == "SIGINT":
        _die_interrupted()
    return ended.status or (BUDGET_MISSED if missed else 0)


def checked_output(option: str, given: str) -> Path:
    """Return the absolute path of a report, after checking that it can be written.

    The target may change the folder (os.chdir), and after a long run its report should not be lost.

    Raises:
        UnwritableOutput: it cannot be written.
    """
    path = Path(given).absolute()
    folder = path if option == "--dump" else path.parent
    try:
        if path != folder and path.is_dir():
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        check_writable(folder)
    except OSError as error:
        problem = error.strerror or str(error)
        raise UnwritableOutput(option=option, path=given, problem=problem) from None
    return path


@dataclass
class Reporter:
    """Write the requested reports of this process, or of all ranks where this one merges them."""

    args: Namespace
    ranks: Ranks

    def __post_init__(self) -> None:
        if self.ranks.world_size > 1:
            self._exchange().clear()

    @property
    def dump(self) -> Path | None:
        if not self.args.dump:
            return None
        folder = Path(self.args.dump)
        return folder / f"rank{self.ranks.rank}" if self.ranks.world_size > 1 else folder

    @property
    def budget(self) -> Budget:
        return Budget(
            max_breaks=self.args.max_breaks,
            max_recompiles=self.args.max_recompiles,
            min_fused=self.args.min_fused,
            max_saved_mb=self.args.max_saved_mb,
        )

    def report(self, observation: Observation, ended: Exit) -> list[str]:
        """Write the reports; return the missed budgets for which this process is to fail."""
        observation.exit = ended
        run = observation.explanation()
        missed = self.budget.missed(run)
        if self.ranks.world_size == 1:
            self._write(run, missed)
            return missed
        exchange = self._exchange()
        exchange.leave(run)
        first = self.ranks.rank == 0
        runs = exchange.collect(_PATIENCE if first and not ended.signal else 0.0)
        if first or len(runs) == self.ranks.world_size:
            of_each = [f"rank {r.rank}: {line}" for r in runs for line in self.budget.missed(r)]
            # The last rank to end completes the file; the text is rank 0's to print, once.
            self._write(merge(runs), of_each, text=first)
            return of_each
        # A rank that fails ends the others, which may be saving a checkpoint: the last one fails
        # for all, unless they lie on machines that do not see each other's reports.
        return [] if self.ranks.local == self.ranks.world_size else missed

    def _write(self, run: Explanation, missed: Sequence[str], *, text: bool = True) -> None:
        if self.args.json:
            from inductor_q.diagnostics.render.json import to_json

            _save(Path(self.args.json), to_json(run))
        if self.args.html:
            from inductor_q.diagnostics.render.html import render

            page = Path(self.args.html)
            _save(page, render(run, missed=missed, folder=page.parent))
        if not text:
            return
        from inductor_q.diagnostics.render import github
        from inductor_q.diagnostics.render import text as as_text

        sys.stdout.flush()
        as_text.write(run, sys.stderr, missed=missed)
        if self.args.github:
            print(*github.annotate(run, missed), sep="\n", file=sys.stderr, flush=True)

    def _exchange(self) -> Exchange:
        if self.args.json:
            return Exchange(Path(self.args.json), self.ranks)
        folder = Path(tempfile.gettempdir()) / f"qfuse-explain-{os.getuid()}"
        name = "".join(c if c.isalnum() else "-" for c in self.ranks.run)
        return Exchange(folder / f"{name}.json", self.ranks)


def _save(path: Path, text: str) -> None:
    """Write a report; the other ones, and the target's exit status, outlive a full disk."""
    try:
        write_whole(path, text)
    except OSError as error:
        print(f"qfuse: {path} was not written: {error.strerror}", file=sys.stderr)


@contextlib.contextmanager
def _on_sigterm(report: Callable[[], object]) -> Iterator[None]:
    """Report before SIGTERM ends the process, as it would without us: nothing of the target runs.

    This holds only where SIGTERM still has its default effect; a handler that the target installs
    replaces ours.
    """
    if not _sigterm_is_ours():
        yield
        return
    process = os.getpid()

    def handler(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:  # not in a worker that the target forked
            report()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def _sigterm_later() -> Iterator[None]:
    """Let SIGTERM wait for the end of the block.

    Where one rank has missed a budget and exits, torchrun terminates the others, among them the one
    that writes the merged report.
    """
    if not _sigterm_is_ours():
        yield
        return
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if received:
            os.kill(os.getpid(), signal.SIGTERM)


def _sigterm_is_ours() -> bool:
    """Return whether a handler can be set, and the target has set none."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _die_interrupted() -> NoReturn:
    """End as an uncaught Ctrl-C does, whose traceback has been printed.

    Exit handlers run, then the process dies of SIGINT. Raising KeyboardInterrupt again would not
    do: started by `python -m`, Python 3.12 then exits with status 1.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    raise AssertionError("SIGINT does not end this process")
