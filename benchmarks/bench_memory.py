"""Draw step time over peak memory: what `qfuse.memory` plans, beside checkpointing by hand.

The step is that of ``bench_step --recipe trainer`` without its optimizer: 4 layers of Qwen3-8B's
shapes on a GPU, a small model on a CPU, where no peak is measured. Peers are stock Inductor and
qfuse, each as it is and with transformers' gradient checkpointing, and qfuse with budgets that
leave a share of what its step takes without one: ``qfuse at 0.5``; on a GPU also where tensors may
be offloaded to the host: ``qfuse at 0.5, offloading``. A row has the measured peak,
what of it does not live between steps (``transient_bytes``), and of a budget the planned peak, the
bytes that backward computes again, and those offloaded. ``qfuse`` has a budget that nothing
exceeds: functorch's own partition is taken, and its peak is planned all the same. No plan is
corrected here: after the peers before it, no budget's first step has a peak of its own to go by.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

import inductor_q
from benchmarks import bench_step, harness
from benchmarks.recipes import TRAINER
from inductor_q.integrations import prepare_checkpointing

SHARES = (0.75, 0.5, 0.35)
EXTRAS = ("peak_bytes", "planned_bytes", "recomputed_bytes", "offloaded_bytes")
#: More than any machine has.
ALL = 1 << 50


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__, peers=("inductor", "qfuse"))
    parser.add_argument("--layers", type=int, help="default: 4, or 1 with --quick")
    parser.add_argument("--vocab-size", type=int, default=32_000, help="on a GPU")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq-len", type=int, help="default: 2048 on a GPU, 64 on CPU")
    parser.add_argument("--shares", type=float, nargs="*", help=f"default: {SHARES}")
    parser.set_defaults(rank=16, adapter_dtype="fp32", loss_steps=1)
    arguments = parser.parse_args(argv)
    suite = harness.start("bench_memory", arguments)
    on_gpu = suite.device.type == "cuda"
    layers = arguments.layers or (1 if arguments.quick else 4)
    length = arguments.seq_len or (2048 if on_gpu else 64)
    shares = arguments.shares
    if shares is None:
        shares = SHARES[-1:] if arguments.quick else SHARES
    config = bench_step._config(arguments, on_gpu=on_gpu, layers=layers)
    model = bench_step._model(arguments, config, suite.device, TRAINER)
    [ids] = bench_step._batches(config, arguments, length, suite.device)
    suite.settings |= {"layers": layers, "batch": arguments.batch, "seq_len": length}
    rounds = arguments.rounds or (1 if arguments.quick else 4)

    steps: dict[str, Callable[[], object]] = {}
    extra: dict[str, dict[str, Any]] = {}

    def add(name: str, budget: int | None = None, offload: bool = False) -> None:
        peer = name.partition(" ")[0].rstrip(",")
        more = ";qfuse.offload=True" if offload else ""
        options = "" if budget is None else f"[qfuse.memory={budget}{more}]"
        harness.console.print(f"compiling {name}", markup=False)
        steps[name] = _step(model, peer + options, ids)
        extra[name] = _measure(steps[name], suite.device)

    # Each peer adds a graph to the same frame.
    with torch._dynamo.config.patch(recompile_limit=64):
        for peer in arguments.backends:
            add(peer, ALL if peer == "qfuse" else None)
        if "qfuse" in arguments.backends:
            whole = extra["qfuse"]
            for share in shares:
                budget = whole["base_bytes"] + int(share * whole["unplanned_bytes"])
                add(f"qfuse at {share:g}", budget)
                if on_gpu:
                    add(f"qfuse at {share:g}, offloading", budget, offload=True)
        timings = _time(steps, suite, rounds)

        model.gradient_checkpointing_enable({"use_reentrant": False})
        prepare_checkpointing(model)
        steps.clear()
        for peer in arguments.backends:
            add(f"{peer}, checkpointed")
        timings |= _time(steps, suite, rounds)
    case = {"model": "qwen3", "layers": layers, "tokens": f"{arguments.batch} x {length}"}
    flops, moved = bench_step._work(config, arguments.batch * length, length)
    roof = suite.ceilings.roof(flops=flops, bytes=moved)
    suite.add(case, timings, roof=roof, extra=extra)
    harness.finish(suite, arguments, extras=EXTRAS)
    return suite


def _time(
    steps: dict[str, Callable[[], object]], suite: harness.Suite, rounds: int
) -> dict[str, harness.Timing]:
    return harness.time_steps(
        steps,
        suite.device,
        rounds=rounds,
        per_round=5 if suite.device.type == "cuda" else 2,
    )


def _step(model: Any, peer: str, ids: torch.Tensor) -> Callable[[], object]:
    call = harness.compile_as(peer, model)
    step = bench_step.loss_of(call, TRAINER)

    def run() -> torch.Tensor:
        loss = step(ids)
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return run


def _measure(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Compile a step, and say what it takes and what was planned."""
    gc.collect()
    before = inductor_q.last_report()
    step()
    found: dict[str, Any] = {}
    report = inductor_q.last_report()
    if report is not None and report is not before and (plan := report.memory) is not None:
        found |= {
            "base_bytes": plan.base,
            "planned_bytes": plan.peak,
            "unplanned_bytes": plan.unplanned,
            "recomputed_bytes": plan.recomputed,
            "offloaded_bytes": plan.offloaded,
        }
    found["peak_bytes"] = peak = harness.peak_bytes(step, device)
    held = harness.held_bytes(device)
    found["transient_bytes"] = None if peak is None or held is None else peak - held
    return found


if __name__ == "__main__":
    main()
