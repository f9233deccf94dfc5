"""Draw step time over peak memory: what `qfuse.memory` plans, beside checkpointing by hand.

The step is that of ``bench_step --recipe trainer``: Qwen3-8B shapes on a GPU, a small model on a
CPU, where no peak is measured. Peers are stock Inductor and qfuse, each as it is and with
transformers' gradient checkpointing, and qfuse with budgets that leave a share of what its step
takes unplanned: ``qfuse at 0.5``. A row has the measured peak and, of a budget, the planned one and
the bytes that backward computes again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

import inductor_q
from benchmarks import bench_step, harness
from inductor_q.integrations import prepare_checkpointing

SHARES = (0.8, 0.65, 0.5, 0.35)
RECIPE = bench_step.RECIPES["trainer"]
#: More than any machine has: functorch's own partition is taken, and simulated.
ALL = 1 << 50


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__, peers=("inductor", "qfuse"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=32_000, help="on a GPU")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq-len", type=int, help="default: 2048 on a GPU, 64 on CPU")
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES)
    parser.set_defaults(rank=16, adapter_dtype="fp32", loss_steps=1)
    arguments = parser.parse_args(argv)
    suite = harness.start("bench_memory", arguments)
    on_gpu = suite.device.type == "cuda"
    length = arguments.seq_len or (2048 if on_gpu else 64)
    config = bench_step._config(arguments, on_gpu=on_gpu, layers=arguments.layers)
    model = bench_step._model(arguments, config, suite.device, RECIPE)
    [ids] = bench_step._batches(config, arguments, length, suite.device)
    suite.settings |= {"layers": arguments.layers, "batch": arguments.batch, "seq_len": length}

    steps: dict[str, Callable[[], object]] = {}
    extra: dict[str, dict[str, Any]] = {}
    # Each peer adds a graph to the same frame.
    with torch._dynamo.config.patch(recompile_limit=64):
        for peer in arguments.backends:
            steps[peer] = _step(model, peer, ids)
            extra[peer] = _measure(steps[peer], suite.device)
        if "qfuse" in arguments.backends:
            whole = f"qfuse[qfuse.memory={ALL}]"
            extra["qfuse"] |= _measure(_step(model, whole, ids), suite.device)
            base = extra["qfuse"]["base_bytes"]
            for share in arguments.shares:
                name = f"qfuse at {share:g}"
                budget = base + int(share * extra["qfuse"]["unplanned_bytes"])
                steps[name] = _step(model, f"qfuse[qfuse.memory={budget}]", ids)
                extra[name] = _measure(steps[name], suite.device)
        case = {"layers": arguments.layers, "tokens": f"{arguments.batch} x {length}"}
        rounds = arguments.rounds or (1 if arguments.quick else 4)
        timings = harness.time_steps(steps, suite.device, rounds=rounds)

        model.gradient_checkpointing_enable({"use_reentrant": False})
        prepare_checkpointing(model)
        checkpointed = {
            f"{peer}, checkpointed": _step(model, peer, ids) for peer in arguments.backends
        }
        for name, step in checkpointed.items():
            extra[name] = _measure(step, suite.device)
        timings |= harness.time_steps(checkpointed, suite.device, rounds=rounds)
    suite.add(case, timings, extra=extra)
    harness.finish(suite, arguments, extras=("peak_bytes", "planned_bytes", "recomputed_bytes"))
    return suite


def _step(model: Any, peer: str, ids: torch.Tensor) -> Callable[[], object]:
    call = harness.compile_as(peer, model)
    step = bench_step.loss_of(call, RECIPE)

    def run() -> torch.Tensor:
        loss = step(ids)
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return run


def _measure(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    gc.collect()
    base = harness.held_bytes(device)
    step()
    found: dict[str, Any] = {"base_bytes": base or 0}
    if (report := inductor_q.last_report()) is not None and (plan := report.memory) is not None:
        found |= {
            "base_bytes": plan.base,
            "planned_bytes": plan.peak,
            "unplanned_bytes": plan.unplanned,
            "recomputed_bytes": plan.recomputed,
        }
    found["peak_bytes"] = harness.peak_bytes(step, device)
    return found


if __name__ == "__main__":
    main()
