"""Gather what every benchmark uses, under one name, and the command line that all of them have."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import origin, plots
from benchmarks.measure import (
    Ceilings,
    Timing,
    first_call,
    held_bytes,
    in_sequence,
    measure_ceilings,
    peak_bytes,
    rotations,
    synchronize,
    time_kernels,
    time_steps,
)
from benchmarks.peers import PEERS, available, compile_as
from benchmarks.place import RESULTS, ROOT, device_slug, load, machine, portable
from benchmarks.suite import SCHEMA, Row, Suite, console, duration, heading, size


def parser(doc: str | None, *, peers: Sequence[str] = PEERS) -> argparse.ArgumentParser:
    """Make a parser with the options every benchmark takes."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cpu or cuda (default: what is there)")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases; not saved")
    parser.add_argument("--backends", nargs="+", default=list(peers), metavar="PEER")
    parser.add_argument("--rounds", type=int, default=None, help="interleaved rounds")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument(
        "--statistic",
        choices=("median", "best"),
        default="median",
        help="what to show and compare; best is for a machine shared with others",
    )
    parser.add_argument(
        "--out", type=Path, help="JSON file or folder (default: benchmarks/results/)"
    )
    parser.add_argument("--plot", type=Path, nargs="?", const=Path("auto"), help="write a PNG")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def start(name: str, arguments: argparse.Namespace) -> Suite:
    """Check the device and where the result will come from, seed, measure the ceilings."""
    device = torch.device(arguments.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            sys.exit("--device cuda: torch sees no CUDA device")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    commit = origin.commit()
    path = save_path(name, arguments, device)
    if path is not None:
        try:  # before anything is measured that could not be saved
            origin.require(commit, path.name)
        except origin.MissingOrigin as error:
            sys.exit(f"{error}, or measure without saving: --quick")
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    ceilings = measure_ceilings(device, quick=arguments.quick)
    console.print(
        f"{machine(device)['name']}, torch {torch.__version__}: copy {ceilings.copy_gbps:.0f} GB/s,"
        f" bf16 matmul {ceilings.matmul_tflops:.3g} TFLOP/s"
    )
    busy = load()
    if device.type == "cpu" and busy is not None and busy > 0.5 * torch.get_num_threads():
        console.print(f"[yellow]other processes are running (load {busy:.1f}): expect noise")
    settings = {
        "quick": arguments.quick,
        "backends": arguments.backends,
        "seed": arguments.seed,
    }
    return Suite(name, device, ceilings, settings, arguments.statistic, commit=commit)


def save_path(name: str, arguments: argparse.Namespace, device: torch.device) -> Path | None:
    """Choose where the result goes: the given file or folder, or this repository's results."""
    file = f"{name.removeprefix('bench_')}-{device_slug(device)}.json"
    out: Path | None = arguments.out
    if out is None:
        return None if arguments.quick else RESULTS / file
    return out if out.suffix == ".json" else out / file


def keep(suite: Suite, arguments: argparse.Namespace) -> None:
    """Save the cases that are done, so that a long run which is cut off leaves them."""
    path = save_path(suite.name, arguments, suite.device)
    if path is not None:
        suite.save(path)


def finish(suite: Suite, arguments: argparse.Namespace, *, extras: Sequence[str] = ()) -> None:
    """Print the table, save the JSON and, if requested, the plot."""
    console.print(suite.table(extras=extras))
    for note in suite.notes:
        console.print(note, highlight=False, markup=False)  # a peer's options are in brackets
    path = save_path(suite.name, arguments, suite.device)
    if path is not None:
        console.print(f"wrote {suite.save(path)}")
    if arguments.plot is not None:
        picture = arguments.plot
        if picture == Path("auto"):
            picture = path.with_suffix(".png") if path is not None else Path(f"{suite.name}.png")
        if plots.draw(suite.as_dict(), picture):
            console.print(f"wrote {picture}")


__all__ = [
    "PEERS",
    "RESULTS",
    "ROOT",
    "SCHEMA",
    "Ceilings",
    "Row",
    "Suite",
    "Timing",
    "available",
    "compile_as",
    "console",
    "device_slug",
    "duration",
    "finish",
    "first_call",
    "heading",
    "held_bytes",
    "in_sequence",
    "keep",
    "measure_ceilings",
    "parser",
    "peak_bytes",
    "portable",
    "rotations",
    "size",
    "start",
    "synchronize",
    "time_kernels",
    "time_steps",
]
