"""Time the scripts in examples/ as they are: TRL's SFT and DPO, and transformers' Trainer.

Each run is the script in a process of its own, with empty caches unless ``--caches`` names a
folder where an earlier run left its own (``cold`` says which). ``--together`` starts all runs at
once: they compile side by side, so ``compile_s`` is more than a user waits. Each has the machine
alone from the last half of its steps on.

``qfuse`` is as it stands, ``inductor`` the same with stock Inductor in qfuse's place (what
``QfuseCallback`` prepares is the same, then), ``eager`` with nothing compiled. A GPU gets the eight
layers of Qwen3-8B's shapes and sequences of up to 2,048 bytes of a book, a CPU the toy and its own
short text.

``eager[no cuDNN]`` and ``inductor[no cuDNN]`` have torch prefer other kernels of attention, which
need no plan for each length. With ``--pad`` lengths are few, and peers in CUDA graphs, one for each
length, are added. ``qfuse[name=value;...]`` has options of a preset.

A step lasts from the end of an optimizer's step to that of the next, data loading and logging
included; the median is of the last half of the steps. ``peak`` is on a GPU the memory that torch
has reserved in that half, ``allocated`` what tensors took of it. ``loss_deviation`` is the largest
difference of a step's loss from eager's, relative to eager's, or to a hundredth of its first where
that is more: DPO's loss falls to nothing, and a difference relative to that says nothing. ``line``
is what the callback printed: layers, graphs, breaks.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import alone, harness
from benchmarks.byte_models import BOOK
from benchmarks.peers import peer_options
from examples.common import SIZES, make_checkpoint
from inductor_q.presets import select, tuned
from inductor_q.tuning.launch import Launcher
from inductor_q.tuning.plan import BASE, EAGER, STOCK, Condition
from inductor_q.tuning.runs import Run
from inductor_q.tuning.sweep import OutOfBudget

NO_CUDNN = {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}
GRAPHS = {"TORCHINDUCTOR_CUDAGRAPHS": "1"}
#: By peer: the condition that it is, and variables of its process. `qfuse[...]` has options.
PEERS: dict[str, tuple[Condition, dict[str, str]]] = {
    "eager": (EAGER, {}),
    "eager[no cuDNN]": (EAGER, NO_CUDNN),
    "qfuse": (BASE, {}),
    "inductor[no cuDNN]": (STOCK, NO_CUDNN),
    "inductor": (STOCK, {}),
    "inductor[CUDA graphs]": (STOCK, GRAPHS),
    "qfuse[CUDA graphs]": (BASE, GRAPHS),
}
#: Where lengths are those of the batches, and where they are few.
AS_THEY_ARE = ("eager", "eager[no cuDNN]", "qfuse", "inductor[no cuDNN]", "inductor")
PADDED = ("eager", "qfuse", "qfuse[CUDA graphs]", "inductor", "inductor[CUDA graphs]")
ROOT = Path(__file__).parent.parent
#: By name: the script and its own options.
SCRIPTS = {
    "SFT": "examples/sft.py",
    "SFT, packing": "examples/sft.py --packing",
    "DPO": "examples/dpo.py",
    "Trainer": "examples/trainer.py",
}
EXTRAS = ("compile_s", "peak_bytes", "allocated_bytes", "loss_deviation", "line")
LINE = re.compile(r"^.*\d+ of \d+ .*layers.*$", re.M)


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__, peers=())
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pad", type=int, help="pad lengths to a multiple of this")
    parser.add_argument("--caches", type=Path, help="keep caches and logs in this folder")
    parser.add_argument("--together", action="store_true", help="compile all side by side")
    parser.add_argument(
        "--limit", type=float, default=600.0, help="seconds for a run and its waiting"
    )
    arguments = parser.parse_args(argv)
    if arguments.pad and arguments.out is None:
        parser.error("--pad: name a file by --out, since the usual one is of scripts as they are")
    arguments.backends = arguments.backends or [*(PADDED if arguments.pad else AS_THEY_ARE)]
    suite = harness.start("bench_trainers", arguments)
    suite.settings |= {name: getattr(arguments, name) for name in ("steps", "pad", "together")}
    place = tuned.place_of(suite.device)
    peers = sorted(arguments.backends, key=lambda peer: peer != "eager")
    conditions = {peer: _condition(peer) for peer in peers}
    wanted = [(name, peer) for name in arguments.scripts for peer in peers]
    runs: dict[tuple[str, str], tuple[Run, str]] = {}
    with contextlib.ExitStack() as stack:
        work = arguments.caches or _temporary(stack)
        folder = Path(os.environ.get(alone.FOLDER) or _temporary(stack))
        given = ["--steps", str(arguments.steps), *_size(suite.device, stack)]
        given += ["--pad", str(arguments.pad)] if arguments.pad else []
        pool = stack.enter_context(ThreadPoolExecutor(len(wanted) if arguments.together else 1))
        crew = Crew(folder)
        futures = {}
        for name, peer in wanted:
            command = " ".join([str(ROOT / SCRIPTS[name]), *given])
            own = work / _slug(name) / _slug(peer)
            launch = Launcher(command, arguments.steps, place, select(suite.device), own)
            future = pool.submit(_run, launch, *conditions[peer], crew, arguments.limit)
            futures[future] = name, peer
        try:
            for future in as_completed(futures):
                name, peer = futures[future]
                runs[name, peer] = run, _ = future.result()
                seen = run.error or f"{1e3 * run.step_s:.1f} ms, the process {run.wall_s:.0f} s"
                harness.console.print(f"{name}, {peer}: {seen}", highlight=False, markup=False)
                _fill(suite, {key: runs[key] for key in wanted if key in runs}, arguments.pad)
                harness.keep(suite, arguments)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            crew.end()
            raise
    harness.finish(suite, arguments, extras=EXTRAS)
    return suite


def _size(device: torch.device, stack: contextlib.ExitStack) -> list[str]:
    """Return a script's options for the model and the data of a device."""
    if device.type != "cuda":
        return ["--length", "64"]
    # One model for all processes, since a disk may not hold one of each.
    model = make_checkpoint(_temporary(stack), SIZES["8b"]())
    torch.cuda.empty_cache()
    return ["--model", model, "--length", "2048", "--data", str(BOOK)]


class Crew:
    """The processes that run side by side, which a folder knows of (benchmarks.alone). They are in
    sessions of their own, so Ctrl-C does not reach them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self.over = threading.Event()

    def start(self, *arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = alone.start(self.folder, *arguments, **options)
        self.processes.append(process)
        if self.over.is_set():
            alone.end(self.folder, process)
        return process

    def end(self) -> None:
        self.over.set()
        for process in self.processes:
            alone.end(self.folder, process)


def _run(
    launch: Launcher, condition: Condition, variables: dict[str, str], crew: Crew, limit: float
) -> tuple[Run, str]:
    """Run a script as a peer is. Return with it the line that the callback printed, empty where
    there is none."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    own: list[subprocess.Popen[bytes]] = []

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        own.append(crew.start(*arguments, **options))
        return own[-1]

    variables = {"PYTHONPATH": paths, **variables}
    launch = replace(launch, variables=variables, module="benchmarks.tail", start=start)
    try:
        run = launch(condition, 1, limit)
    except OutOfBudget:
        return Run(condition=condition.name, error=f"took more than {limit:.0f} s"), ""
    finally:
        for process in own:
            alone.end(crew.folder, process)
    log = launch.log(condition, 1).read_text("utf-8", "replace")
    found = None if condition in (EAGER, STOCK) else LINE.search(log)
    return run, found[0].strip() if found else ""


def _condition(peer: str) -> tuple[Condition, dict[str, str]]:
    if peer in PEERS:
        return PEERS[peer]
    options = peer_options(peer) if re.match(r"qfuse\[[^]]*=", peer) else None
    if options is None:
        sys.exit(f"--backends {peer!r}: there are {', '.join(PEERS)} and qfuse[name=value;...]")
    return Condition("options", options), {}


def _fill(
    suite: harness.Suite, runs: Mapping[tuple[str, str], tuple[Run, str]], pad: int | None
) -> None:
    """Write what is known of all runs so far into the suite."""
    suite.rows.clear()
    suite.notes.clear()
    for (name, peer), (run, line) in runs.items():
        if run.error:
            suite.notes.append(f"{name}, {peer}: {run.error}")
            continue
        extra: dict[str, Any] = {"compile_s": run.compile_s, "peak_bytes": run.peak}
        extra |= {"cold": run.cold, "allocated_bytes": run.allocated or None}
        if (name, "eager") in runs:
            eager, _ = runs[name, "eager"]
            if run.losses and eager.losses:
                extra["loss_deviation"] = deviation(run.losses, eager.losses)
        if line:
            extra["line"] = line
        timing = harness.Timing.of(run.seconds[len(run.seconds) // 2 :])
        case = {"script": name, **({"pad": pad} if pad else {})}
        suite.add(case, {peer: timing}, extra={peer: extra})


def deviation(losses: Sequence[float], eager: Sequence[float]) -> float:
    """Return `loss_deviation` of a run, which may have logged fewer losses than eager mode's."""
    least = abs(eager[0]) / 100
    pairs = zip(losses, eager, strict=False)
    return max(abs(ours - theirs) / max(abs(theirs), least) for ours, theirs in pairs)


def _temporary(stack: contextlib.ExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory()))


def _slug(text: str) -> str:
    """Return a name for a folder; two texts have two."""
    readable = re.sub(r"\W+", "-", text).strip("-")
    return f"{readable}-{zlib.crc32(text.encode()):08x}"


if __name__ == "__main__":
    main()
