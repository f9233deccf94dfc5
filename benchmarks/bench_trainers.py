"""Time the scripts in examples/ as they are: TRL's SFT and DPO, and transformers' Trainer.

Each run is the script in a process of its own, with empty caches unless ``--caches`` names a
folder where an earlier run left its own (``cold`` says which): ``qfuse`` as it stands,
``inductor`` the same with stock Inductor in qfuse's place (what ``QfuseCallback`` prepares is the
same, then), ``eager`` with nothing compiled. A GPU gets the eight layers of Qwen3-8B's shapes and
sequences of up to 2,048 bytes of a book, a CPU the toy and its own short text.

``eager[no cuDNN]`` and ``inductor[no cuDNN]`` have torch prefer other kernels of attention, which
need no plan for each length. ``qfuse[CUDA graphs]`` records a graph for each length, of which
``--pad`` leaves few.

A step lasts from the end of an optimizer's step to that of the next, data loading and logging
included; the median is of the last half of the steps. ``peak`` is on a GPU the memory that torch
has reserved in that half. ``loss_deviation`` is the largest difference of a step's loss from
eager's, relative to it. ``line`` is what the callback printed: layers, graphs, breaks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.byte_models import BOOK
from inductor_q.presets import select, tuned
from inductor_q.tuning.launch import Launcher
from inductor_q.tuning.plan import BASE, EAGER, STOCK, Condition
from inductor_q.tuning.runs import Run
from inductor_q.tuning.sweep import OutOfBudget

GRAPHED = "qfuse[CUDA graphs]"
CONDITIONS = {
    "eager": EAGER,
    "inductor": STOCK,
    "qfuse": BASE,
    GRAPHED: Condition("graphs", {"triton.cudagraphs": True}),
}
#: What torch reads to prefer cuDNN's attention less, and the ending of peers that have it.
NO_CUDNN, VARIABLES = "[no cuDNN]", {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}
PEERS = ("eager", "eager[no cuDNN]", "qfuse", GRAPHED, "inductor[no cuDNN]", "inductor")
ROOT = Path(__file__).parent.parent
#: By name: the script and its own options.
SCRIPTS = {
    "SFT": "examples/sft.py",
    "SFT, packing": "examples/sft.py --packing",
    "DPO": "examples/dpo.py",
    "Trainer": "examples/trainer.py",
}
LINE = re.compile(r"^.*\d+ of \d+ .*layers.*$", re.M)


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__, peers=PEERS)
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pad", type=int, help="pad lengths to a multiple of this")
    parser.add_argument("--caches", type=Path, help="keep caches and logs in this folder")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds a run may take")
    arguments = parser.parse_args(argv)
    if arguments.pad and arguments.out is None:
        parser.error("--pad: name a file by --out, since the usual one is of scripts as they are")
    suite = harness.start("bench_trainers", arguments)
    suite.settings |= {"steps": arguments.steps, "pad": arguments.pad}
    on_gpu = suite.device.type == "cuda"
    size = ["--model", "8b", "--length", "2048", "--data", str(BOOK)]
    size = size if on_gpu else ["--length", "64"]
    size += ["--pad", str(arguments.pad)] if arguments.pad else []
    for name in arguments.scripts:
        command = " ".join([str(ROOT / SCRIPTS[name]), "--steps", str(arguments.steps), *size])
        with _folder(arguments.caches, name) as work:
            launch = Launcher(
                command, arguments.steps, tuned.place_of(suite.device), select(suite.device), work
            )  # fmt: skip
            _run(suite, name, launch, arguments)
    harness.finish(suite, arguments, extras=("compile_s", "peak_bytes", "loss_deviation", "line"))
    return suite


@contextlib.contextmanager
def _folder(caches: Path | None, script: str) -> Iterator[Path]:
    """Yield the folder of a script's caches and logs: one that stays, or else a temporary one."""
    if caches is not None:
        yield caches / re.sub(r"\W+", "-", script)
    else:
        with tempfile.TemporaryDirectory() as work:
            yield Path(work)


def _run(suite: harness.Suite, name: str, launch: Launcher, arguments: argparse.Namespace) -> None:
    """Run one script as each peer, and keep what is known after each."""
    case: dict[str, Any] = {"script": name, **({"pad": arguments.pad} if arguments.pad else {})}
    eager: Run | None = None
    for peer in sorted(arguments.backends, key=lambda peer: peer != "eager"):
        condition = CONDITIONS[peer.removesuffix(NO_CUDNN)]
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        variables = {"PYTHONPATH": paths, **(VARIABLES if peer.endswith(NO_CUDNN) else {})}
        own = replace(launch, work=launch.work / re.sub(r"\W+", "-", peer), variables=variables)
        try:
            run = own(condition, 1, arguments.limit)
        except OutOfBudget:
            run = Run(condition=condition.name, error=f"took more than {arguments.limit:.0f} s")
        if run.error:
            suite.notes.append(f"{name}, {peer}: {run.error}")
            harness.keep(suite, arguments)
            continue
        seen = f"{name}, {peer}: {1e3 * run.step_s:.1f} ms, the process {run.wall_s:.0f} s"
        harness.console.print(seen, highlight=False, markup=False)
        eager = run if peer == "eager" else eager
        extra: dict[str, Any] = {"compile_s": run.compile_s, "peak_bytes": run.peak}
        extra["cold"] = run.cold
        if eager is not None:
            pairs = zip(run.losses, eager.losses, strict=False)  # a run may log fewer
            extra["loss_deviation"] = max(abs(a - b) / abs(b) for a, b in pairs)
        log = (own.work / condition.name / "run1.log").read_text("utf-8", "replace")
        if peer.startswith("qfuse") and (found := LINE.search(log)):
            extra["line"] = found[0].strip()
        timing = harness.Timing.of(run.seconds[len(run.seconds) // 2 :])
        suite.add(case, {peer: timing}, extra={peer: extra})
        harness.keep(suite, arguments)


if __name__ == "__main__":
    main()
