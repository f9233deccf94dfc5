"""Measure what observation costs: a fresh compile of a QLoRA step, plain and under `observe`.

Forward and backward of a small QLoRA Llama are compiled from nothing (Dynamo and every cache
empty), in turns, after one throw-away compile has loaded the compiler. `qfuse explain` aims at 10 %
at most; `cpu` are the seconds of this process alone, without the C++ or Triton compiler's, which
depend less on what else the machine does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import harness
from inductor_q import testing
from inductor_q.diagnostics.observation import observe

PEERS = ("plain", "observed")


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__, peers=("inductor", "qfuse"))
    parser.add_argument("--layers", type=int, default=2)
    arguments = parser.parse_args(argv)
    suite = harness.start("bench_explain", arguments)
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    config = testing.tiny_llama_config(num_hidden_layers=arguments.layers)
    model = testing.qlora_model(config, adapter_dtype=torch.bfloat16, device=suite.device)
    ids = torch.randint(0, config.vocab_size, (2, 32), device=suite.device)
    for backend in arguments.backends:
        _compile(model, ids, backend, observed=False)
        wall: dict[str, list[float]] = {peer: [] for peer in PEERS}
        cpu: dict[str, list[float]] = {peer: [] for peer in PEERS}
        for order in harness.rotations(PEERS, rounds):
            for peer in order:
                took = _compile(model, ids, backend, observed=peer == "observed")
                wall[peer].append(took[0])
                cpu[peer].append(took[1])
        case = {"backend": backend, "layers": arguments.layers}
        extra = {peer: {"cpu": harness.Timing.of(seconds).median} for peer, seconds in cpu.items()}
        suite.add(case, {p: harness.Timing.of(s) for p, s in wall.items()}, extra=extra)
        over = extra["observed"]["cpu"] / extra["plain"]["cpu"] - 1
        ratio = suite.ratio(case, "observed", "plain")
        assert ratio is not None
        suite.notes.append(f"{backend}: {ratio - 1:+.1%} of wall time, {over:+.1%} of CPU time")
    harness.finish(suite, arguments)
    return suite


def _compile(model: Any, ids: torch.Tensor, backend: str, *, observed: bool) -> tuple[float, float]:
    """Return wall and CPU seconds of the first step, compiled from nothing."""
    torch._dynamo.reset()
    compiler = testing.qfuse_backend() if backend == "qfuse" else backend
    watch: Any = observe() if observed else contextlib.nullcontext()
    with testing.fresh_cache():
        wall, cpu = time.perf_counter(), time.process_time()
        with watch:
            compiled: Any = torch.compile(model, backend=compiler)
            compiled(input_ids=ids, labels=ids).loss.backward()
        harness.synchronize(ids.device)
        took = time.perf_counter() - wall, time.process_time() - cpu
    model.zero_grad()
    return took


if __name__ == "__main__":
    main()
