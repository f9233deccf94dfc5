"""Run every benchmark by ``python -m benchmarks``, at the sizes this machine can take.

``python -m benchmarks origin FILE...`` compares results with the commits that they name,
``python -m benchmarks plot FILE...`` draws them, and ``python -m benchmarks together FILE`` runs
the commands of a file side by side.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import origin, plots, together

NAMES = (
    "bench_adapter",
    "bench_attention",
    "bench_decode",
    "bench_dequantize",
    "bench_experts",
    "bench_explain",
    "bench_families",
    "bench_formats",
    "bench_kbit",
    "bench_launch",
    "bench_layers",
    "bench_linear",
    "bench_loss",
    "bench_memory",
    "bench_moe",
    "bench_moe_model",
    "bench_parts",
    "bench_recipe",
    "bench_rows",
    "bench_start",
    "bench_step",
    "bench_thresholds",
    "bench_trainers",
    "bench_walks",
)

#: ``--brief`` runs these in this order, in so few rounds: the results that the README and
#: docs/benchmarks.md lead with.
BRIEF = {
    "bench_step": ("--compile-rounds", "1", "--graph-layers", "1", "--rounds", "5"),
    "bench_moe_model": ("--rounds", "3"),
    "bench_dequantize": ("--rounds", "3"),
    "bench_kbit": ("--rounds", "3"),
    "bench_linear": ("--rounds", "2"),
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["origin"]:
        return origin.main(arguments[1:])
    if arguments[:1] == ["plot"]:
        return plots.main(arguments[1:])
    if arguments[:1] == ["together"]:
        return together.main(arguments[1:])
    return run(arguments)


def run(argv: Sequence[str]) -> int:
    """Run benchmarks one after another; options that are not listed go to each of them."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME")
    parser.add_argument("--brief", action="store_true", help=f"{', '.join(BRIEF)}: few rounds")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for all of them")
    parser.add_argument("--out", type=Path, help="a folder for the JSON files")
    arguments, rest = parser.parse_known_args(argv)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        rest += ["--out", str(arguments.out)]
    names = arguments.only or (tuple(BRIEF) if arguments.brief else NAMES)
    end = time.monotonic() + arguments.limit
    failed = []
    for name in names:
        options = BRIEF.get(name, ()) if arguments.brief else ()
        if not _run(name, [*options, *rest], end - time.monotonic()):
            failed.append(name)
    if failed:
        print(f"failed or out of time: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


def _run(name: str, options: Sequence[str], seconds: float) -> bool:
    """Run a benchmark in a process of its own; return whether it ended well and in time.

    A benchmark must not inherit the compiled code or the memory of the one before.
    """
    if seconds <= 0:
        print(f"{name}: not started, no time is left", file=sys.stderr)
        return False
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    began = time.monotonic()
    try:
        code = subprocess.run(command, timeout=seconds if seconds < 1e9 else None)
    except subprocess.TimeoutExpired:
        print(f"{name}: stopped after {time.monotonic() - began:.0f} s", file=sys.stderr)
        return False
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    return code.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
