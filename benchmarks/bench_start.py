"""Time the first training step of a process: with empty caches, with packed ones, over the depth.

A QLoRA model of Qwen3's architecture is compiled as a whole (``regions`` "model") or each layer by
itself ("layers"), by stock Inductor and by qfuse. Each first step runs in a process of its own:

1. cold: Inductor's cache folder, which has qfuse's in it, is new and empty;
2. warm: the folder is packed by ``qfuse cache pack``, and unpacked into another one for a new
   process, which then also times a few more steps.

The first step is forward, loss and backward, until the device has finished; importing libraries and
building the model come before it, and are ``imports_s`` and ``build_s``. ``cpu_s`` are the seconds
that the processors gave to the process and to the compilers that it called, which depend less on
what else a machine does. ``dynamo_s`` is tracing and guards, ``passes_s`` are qfuse's passes and
``inductor_s`` is Inductor from its graphs on, compilers included; they lie within the step.

``--recipe`` is a trainer's step by default (``benchmarks/recipes.py``). A CPU gets a narrow model,
which at most ``--whole-layers`` deep is compiled as a whole, a GPU the shapes of Qwen3-8B.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.bench_step import checkpoint, loss_of
from benchmarks.recipes import RECIPES

NARROW = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
TINY = {**NARROW, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}

Seen = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> harness.Suite | None:
    parser = harness.parser(__doc__, peers=("inductor", "qfuse"))
    parser.add_argument("--layers", type=int, nargs="+", help="default: 4, 12 and 36")
    parser.add_argument("--whole-layers", type=int, help="default: 12 on a CPU, 36 on a GPU")
    parser.add_argument("--regions", nargs="+", choices=("model", "layers"))
    parser.add_argument("--recipe", choices=RECIPES, default="trainer")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq-len", type=int, help="default: 2048 on a GPU, 128 on a CPU")
    parser.add_argument("--steps", type=int, default=10, help="that a warm process times")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        print(json.dumps(first_step(**json.loads(arguments.child))))
        return None
    name = "bench_start" + ("" if arguments.recipe == "trainer" else f"_{arguments.recipe}")
    suite = harness.start(name, arguments)
    on_gpu = suite.device.type == "cuda"
    depths = arguments.layers or ((1, 2) if arguments.quick else (4, 12, 36))
    whole = arguments.whole_layers or (36 if on_gpu else 12)
    spec: Seen = {
        "device": str(suite.device),
        "recipe": arguments.recipe,
        "batch": arguments.batch,
        "length": arguments.seq_len or (2048 if on_gpu else 32 if arguments.quick else 128),
        "shapes": None if on_gpu else TINY if arguments.quick else NARROW,
        "threads": arguments.threads,
        "seed": arguments.seed,
    }
    suite.settings |= {**spec, "steps": arguments.steps}
    for regions in arguments.regions or (("layers",) if arguments.quick else ("model", "layers")):
        for layers in depths:
            if regions == "model" and layers > whole:
                continue
            for peer in harness.available(arguments.backends):
                given = {**spec, "layers": layers, "regions": regions, "peer": peer}
                cold, warm = _cold_and_warm(given, 2 if arguments.quick else arguments.steps)
                case = {"regions": regions, "layers": layers}
                timing = harness.Timing.of([cold.pop("first_s")])
                suite.add(case, {peer: timing}, extra={peer: {**cold, "warm": warm}})
                harness.keep(suite, arguments)
                told = f"{regions}, {layers} layers, {peer}: {timing.median:.1f} s cold, "
                harness.console.print(f"{told}{warm['first_s']:.1f} s warm", highlight=False)
    _sum_up(suite)
    harness.finish(suite, arguments, extras=("cpu_s", "graphs"))
    return suite


def _sum_up(suite: harness.Suite) -> None:
    for regions in dict.fromkeys(case["regions"] for case in suite.cases()):
        for peer in suite.peers():
            rows = [r for r in suite.rows if (r.case["regions"], r.peer) == (regions, peer)]
            least, most = rows[0], rows[-1]
            deeper = most.extra["cpu_s"] / least.extra["cpu_s"]
            warm = most.extra["warm"]["cpu_s"] / most.extra["cpu_s"]
            suite.notes.append(
                f"{peer}, regions {regions}: {most.case['layers']} layers take {deeper:.2f} times "
                f"the processor time of {least.case['layers']}; warm over cold {warm:.3f}"
            )


# --- the parent -----------------------------------------------------------------------


def _cold_and_warm(spec: Seen, steps: int) -> tuple[Seen, Seen]:
    with tempfile.TemporaryDirectory(prefix="bench_start") as folder:
        packed, full, other = (Path(folder, name) for name in ("caches.tar.gz", "full", "other"))
        cold = _run(full, "benchmarks.bench_start", "--child", json.dumps({**spec, "steps": 0}))
        _run(full, "inductor_q", "cache", "pack", str(packed))
        shutil.rmtree(full)  # a file with a path into it would be found there
        _run(other, "inductor_q", "cache", "unpack", str(packed))
        warm = _run(
            other, "benchmarks.bench_start", "--child", json.dumps({**spec, "steps": steps})
        )
        return json.loads(cold), {**json.loads(warm), "packed_bytes": packed.stat().st_size}


def _run(cache: Path, module: str, *arguments: str) -> str:
    """Run a module in a process with its own cache folder, and return its last line."""
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**kept, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        cwd=harness.ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{module} {' '.join(arguments)} failed:\n{done.stderr[-4000:]}")
    return done.stdout.splitlines()[-1]


# --- the process that takes the step --------------------------------------------------


def first_step(
    *,
    peer: str,
    regions: str,
    layers: int,
    shapes: Seen | None,
    recipe: str,
    batch: int,
    length: int,
    device: str,
    threads: int | None,
    seed: int,
    steps: int,
) -> Seen:
    """Build the model, take its first step, and tell what that took."""
    began = time.perf_counter()
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    import transformers  # noqa: F401

    from inductor_q import testing

    imported = time.perf_counter()
    if threads is not None:
        torch.set_num_threads(threads)
    plan, on = RECIPES[recipe], torch.device(device)
    config = (
        testing.qwen3_8b_config(layers, vocab_size=32_000)
        if shapes is None
        else testing.tiny_qwen3_config(**{**shapes, "num_hidden_layers": layers})
    )
    bf16 = torch.bfloat16 if plan.adapters == "bf16" or not plan.autocast else None
    settings: Seen = {"dropout": plan.dropout, "prepare": plan.prepared, "adapter_dtype": bf16}
    model = testing.qlora_model(config, device=on, seed=seed, **settings)
    checkpoint(model, plan)
    ids = torch.randint(0, config.vocab_size, (batch, length), device=on)
    _compile(peer, regions, model)
    loss = loss_of(model, plan)

    def step() -> None:
        loss(ids).backward()
        model.zero_grad(set_to_none=True)

    harness.synchronize(on)
    seen: Seen = {"imports_s": imported - began, "build_s": time.perf_counter() - imported}
    cpu = cpu_seconds()
    seen["first_s"] = harness.first_call(step, on)
    seen |= {"cpu_s": cpu_seconds() - cpu, **_counted()}
    if steps:
        seen["step_s"] = harness.time_steps({"step": step}, on, rounds=steps, per_round=1)["step"]
        seen["step_s"] = seen["step_s"].best
    return seen


def _compile(peer: str, regions: str, model: Any) -> None:
    import inductor_q
    from inductor_q.integrations.regions import compiled_regions

    if peer == "qfuse":
        inductor_q.compile(model, regions="layers" if regions == "layers" else "model")
        return
    parts = compiled_regions(model, "layers") if regions == "layers" else [model]
    for part in parts:
        part.compile(backend=peer)


def cpu_seconds() -> float:
    """Return what the processors gave to this process and to compilers, those alive included, as
    Inductor's workers are."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    own = sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, who))
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = file.read_text().rpartition(")")[2].split()
            parents[int(file.parent.name)] = int(fields[1])
            ticks[int(file.parent.name)] = sum(map(int, fields[11:15]))  # with its own children
    below, found = {os.getpid()}, set[int]()
    while below:
        below = {process for process, parent in parents.items() if parent in below}
        found |= below
    return own + sum(ticks[process] for process in found) / os.sysconf("SC_CLK_TCK")


def _counted() -> Seen:
    """Return what torch and qfuse have counted and timed so far in this process."""
    from torch._dynamo import utils

    from inductor_q.backend import reports

    times, counters = utils.compilation_time_metrics, utils.counters
    seconds: Callable[[str], float] = lambda name: sum(times.get(name, ()))  # noqa: E731
    found: Seen = {
        "dynamo_s": seconds("_compile.compile_inner") - seconds("OutputGraph.call_user_compiler"),
        "inductor_s": seconds("compile_fx_inner"),
        "passes_s": sum(p.seconds for r in reports() if not r.cached for p in r.passes),
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
    }
    for cache, names in (("aot_autograd", "autograd"), ("inductor", "fxgraph")):
        for kind in ("hit", "miss", "bypass"):
            found[f"{names}_{kind}"] = counters[cache][f"{names}_cache_{kind}"]
    return found


if __name__ == "__main__":
    main()
