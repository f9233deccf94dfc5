"""`qfuse tune` measures a preset for this device, which "auto" takes from then on."""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from inductor_q.commands import Subparsers
    from inductor_q.presets import Preset
    from inductor_q.presets.tuned import Place
    from inductor_q.tuning.sweep import Sweep

EPILOG = """\
Each condition runs twice, in two orders, each time in a new process: the preset
that ships, stock Inductor, eager mode, the preset with one change at a time,
and at the end the changes that were faster, together. The best is written to
the user's folder of configuration (~/.config/qfuse), where "auto" finds it
while device, torch and version stay the same; qfuse presets tuned prints it
with its evidence. A run that was killed goes on where it was. docs/training.md
says more.
"""


def register(subparsers: Subparsers) -> None:
    help = "measure which options are faster on this device, and keep them as a preset"
    parser = subparsers.add_parser(
        "tune",
        help=help,
        description=help,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        default="",
        metavar="MODEL",
        help="package.module:factory, or a script in quotes with its arguments "
        "(default: a small QLoRA model under a Trainer)",
    )
    parser.add_argument(
        "--budget", type=_seconds, default="20m", metavar="TIME", help="90s, 20m (default), 2h"
    )
    parser.add_argument("--steps", type=_steps, default=30, metavar="N", help="a run (default: 30)")
    parser.add_argument(
        "--compute",
        action="append",
        choices=("fp8", "int8"),
        default=[],
        help="try qfuse.compute too; it is shown, and never set by a preset",
    )
    parser.add_argument("--fresh", action="store_true", help="measure again what was measured")
    parser.add_argument("--plot", metavar="FILE", help="a picture of the table, as PNG")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Measure; the exit status is 1 where the budget ended before everything was measured."""
    import os
    import signal
    import tempfile
    from pathlib import Path

    from inductor_q.cache import source_digest
    from inductor_q.diagnostics.launch import checked_output
    from inductor_q.options import current_device
    from inductor_q.presets import shipped, tuned
    from inductor_q.tuning.launch import BY_PRESET, Launcher, inherited
    from inductor_q.tuning.progress import Progress
    from inductor_q.tuning.runs import Runs
    from inductor_q.tuning.sweep import Sweep

    device = current_device()
    preset, place = shipped(device), tuned.place_of(device)
    key = {
        **vars(place),
        "sources": source_digest()[:16],
        "model": args.model or "default",
        "steps": args.steps,
        **inherited(os.environ),
    }
    checked_output("the preset", str(tuned.path_of(place)))
    if args.plot:
        checked_output("--plot", args.plot)
    runs = Runs(tuned.folder() / "tune.jsonl", key)
    if args.fresh:
        runs.begin_anew()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the run as well
    print(f"qfuse tune: {place}; over the preset {preset.name}; runs in {runs.path}", flush=True)
    if unused := [name for name in BY_PRESET if os.environ.get(name, "").strip()]:
        print(f"not in force here, since it is what is tried: {', '.join(unused)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="qfuse-tune-") as work, Progress() as progress:
        launch = Launcher(args.model, args.steps, place, preset, Path(work))
        sweep = Sweep(device.type, preset, runs, launch, args.budget, args.compute)
        sweep.begin, sweep.end = progress.begin, progress.end
        sweep.run()
    _show(sweep)
    _keep(sweep, place, preset, args)  # before the picture, which may fail
    if args.plot:
        _draw(sweep, place, Path(args.plot))
    if not sweep.complete:
        print("The budget ended before all was measured; the same command goes on from here.")
    return 0 if sweep.complete else 1


def _show(sweep: Sweep) -> None:
    from inductor_q.commands import listing
    from inductor_q.tuning import table

    form = argparse.Namespace(json=False, markdown=False)
    judged = sweep.judged
    tables = [listing.Table(table.COLUMNS, table.rows(judged), below=True)]
    if sweep.left_out:
        tables.append(listing.Table(("not tried", "why"), list(sweep.left_out.items())))
    listing.show(tables, form)


def _draw(sweep: Sweep, place: Place, path: Path) -> None:
    from inductor_q.tuning import table

    try:
        if not table.draw(sweep.judged, str(place), path):
            print("There is no picture: matplotlib is not installed.")
    except OSError as error:
        print(f"There is no picture: {error}")


def _keep(sweep: Sweep, place: Place, preset: Preset, args: argparse.Namespace) -> None:
    """Write the best as the preset of this place; where nothing is faster, leave what is there."""
    from inductor_q.presets import tuned
    from inductor_q.tuning import result

    best = sweep.best
    path = tuned.path_of(place)
    if best is None:
        stays = f"{path}, of an earlier sweep," if path.exists() else f"the preset {preset.name}"
        print(f"Nothing that was measured is faster beyond noise: {stays} stays in force.")
        return
    made = result.preset_of(preset, best, sweep.judged, model=args.model, steps=args.steps)
    tuned.write(path, place, made, base=preset.name)
    print(f"preset: tuned, {', '.join(result.named(best))}, in {path}", file=sys.stdout)


_UNITS = {"s": 1, "m": 60, "h": 3600}


def _seconds(text: str) -> float:
    """Read a time as seconds: 90s, 20m, 2h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text} is no time: 90s, 20m, 2h")
    return float(found[1]) * _UNITS[found[2]]


def _steps(text: str) -> int:
    """Read a number of steps: 4 or more, as half of them are measured."""
    if not text.isdecimal() or int(text) < 4:
        raise argparse.ArgumentTypeError(f"{text} is no number of steps, 4 or more")
    return int(text)
