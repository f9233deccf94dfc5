"""Run the commands of a file side by side: they compile at once and measure one at a time.

A benchmark compiles for minutes on a few cores and measures for seconds. Each line of the file is a
name and a Python module with arguments:

    trainer: benchmarks.bench_step --recipe trainer --layers 4 --compile-rounds 0
    kernels: pytest -q -m gpu tests/kernels

Each command has its own caches of compiled code, since one that is stopped might hold a lock on a
shared one. What it prints is in <out>/<name>.txt, and a benchmark's result in <out>/<name>.json,
for which any other command may say {json} among its arguments.
The seconds of first calls and compiles are not to be believed in such a run: the commands share
the cores.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import alone


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks together", description=__doc__)
    parser.add_argument("file", type=Path, help="a name and a module with arguments a line")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these lines of it")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for all")
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    arguments = parser.parse_args(argv)
    commands = read(arguments.file.read_text())
    if unknown := set(arguments.only or ()) - commands.keys():
        parser.error(f"{arguments.file} has no {', '.join(sorted(unknown))}: {', '.join(commands)}")
    chosen = {n: c for n, c in commands.items() if n in (arguments.only or commands)}
    return run(chosen, arguments.out, arguments.limit)


def read(text: str) -> dict[str, list[str]]:
    """Return the module and the arguments of each name."""
    commands: dict[str, list[str]] = {}
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        name = words[0].removesuffix(":")
        if not words[0].endswith(":") or len(words) == 1 or name in commands:
            raise ValueError(f"{line!r} is not a name of its own, a colon, a module, arguments")
        commands[name] = words[1:]
    return commands


def run(commands: Mapping[str, Sequence[str]], out: Path, limit: float) -> int:
    """Run them all, for `limit` seconds at most; return whether one failed or was stopped."""
    out.mkdir(parents=True, exist_ok=True)
    began, failed = time.monotonic(), []
    with tempfile.TemporaryDirectory() as scratch:
        running = {n: _start(n, command, out, Path(scratch)) for n, command in commands.items()}
        while running:
            time.sleep(0.2)
            alone.wake(Path(scratch))
            late = time.monotonic() - began > limit
            for name, process in list(running.items()):
                if process.poll() is None and not late:
                    continue
                alone.end(Path(scratch), process)
                del running[name]
                ending = "stopped" if late else f"ended with {process.returncode}"
                print(f"{name}: {ending} after {time.monotonic() - began:.0f} s", flush=True)
                failed += [name] if process.returncode else []
    if failed:
        print(f"failed or out of time: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


def _start(name: str, command: Sequence[str], out: Path, scratch: Path) -> subprocess.Popen[bytes]:
    caches = scratch / name
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    file = str(out / f"{name}.json")
    command = [word.replace("{json}", file) for word in command]
    result = ["--out", file] if command[0].startswith("benchmarks.") else []
    with (out / f"{name}.txt").open("wb") as log:
        return alone.start(
            scratch,
            [sys.executable, "-m", *command, *result],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
