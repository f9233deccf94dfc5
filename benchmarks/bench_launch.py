"""Measure what one dequantization costs the host, in microseconds until it is queued.

The weight is so small that the GPU is done before the host has queued the next call, and thousands
of calls run in a row. ``wall`` is the time until the GPU has finished them too: where it is not
longer, the host is all that was measured.

- ``qfuse``: the call in compiled code, which launches what Triton has compiled through the driver
  (inductor_q/kernels/triton_launch.py).
- ``runner``: the same call, where Triton launches the kernel it has compiled.
- ``jit``: the same call through Triton's JIT each time: ``kernel[grid](...)``.
- ``op``: ``inductor_q.ops.dequantize`` in eager mode, checks and allocation included.
- ``bitsandbytes``: ``dequantize_4bit``, likewise in eager mode.

On a CPU a call takes as long as its kernel; the two of Triton are left out.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from benchmarks import harness
from inductor_q import ops, testing
from inductor_q.capture.bnb_state import bnb_operands
from inductor_q.formats import FORMATS
from inductor_q.kernels.dequantize import POINTWISE, PREPARED, compiled_by
from inductor_q.kernels.dequantize_triton import Triton
from inductor_q.lowerings.calls import qfuse_dequantize

PEERS = ("qfuse", "runner", "jit", "op", "bitsandbytes")
#: Peers that take another way through Triton, as methods of `Repeated`.
WAYS = {"runner": "by_triton", "jit": "by_jit"}
SHAPE = {"cuda": (1024, 1024), "cpu": (64, 64)}

Call = Callable[..., Any]


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__, peers=PEERS)
    parser.add_argument("--calls", type=int, help="queued in a row (default: 2000, quick: 50)")
    arguments = parser.parse_args(argv)
    if unknown := [peer for peer in arguments.backends if peer not in PEERS]:
        parser.error(f"no peer {', '.join(unknown)}; known: {', '.join(PEERS)}")
    suite = harness.start("bench_launch", arguments)
    count = arguments.calls or (50 if arguments.quick else 2000)
    n, k = SHAPE[suite.device.type]
    suite.settings |= {"calls": count, "dtype": "bf16"}
    weight = torch.randn(n, k, device=suite.device, dtype=torch.bfloat16)
    linear = testing.quantized_linear(weight)
    packed, state = linear.weight.data, linear.weight.quant_state
    operands, format, _ = bnb_operands(packed, state)
    calls = _calls(arguments.backends, suite.device, packed, state)
    rounds = arguments.rounds or (2 if arguments.quick else 9)
    timings, walls = _time(calls, suite.device, rounds=rounds, count=count)
    moved = sum(t.nbytes for t in operands) + weight.nbytes
    extra = {peer: {"wall_s": wall.median} for peer, wall in walls.items()}
    case = {"format": format, "N": n, "K": k}
    suite.add(case, timings, roof=suite.ceilings.roof(bytes=moved), extra=extra)
    harness.finish(suite, arguments, extras=("wall_s",))
    return suite


def _calls(
    peers: Sequence[str], device: torch.device, packed: torch.Tensor, state: Any
) -> dict[str, tuple[Call, dict[Any, Any]]]:
    """Return each peer's call, and the launches that are prepared for it, all checked bitwise."""
    dequantize_4bit = testing.bitsandbytes().functional.dequantize_4bit
    operands, format, shape = bnb_operands(packed, state)
    out = torch.empty(shape, dtype=state.dtype, device=device)
    provider = compiled_by(device.type, fmt=FORMATS[format])
    provider = "auto" if provider == POINTWISE else provider  # no kernel but the reference
    compiled = functools.partial(qfuse_dequantize, operands, format, provider, out=out)
    known: dict[str, Call] = {
        "op": lambda: ops.dequantize(operands, format, shape, state.dtype),
        "bitsandbytes": lambda: dequantize_4bit(packed, state),
    }
    expected = dequantize_4bit(packed, state)
    calls: dict[str, tuple[Call, dict[Any, Any]]] = {}
    for peer in peers:
        if peer in WAYS and provider != Triton.name:
            harness.console.print(f"[yellow]without {peer}: Triton does not launch on {device}")
            continue
        call, launches = known.get(peer, compiled), dict[Any, Any]()
        with mock.patch.object(PREPARED, "launches", launches):
            out.zero_()
            result = call()
            if peer in WAYS:
                [(key, plan)] = launches.items()
                launches[key] = _by(getattr(plan.launch, WAYS[peer]), plan.tensors)
                out.zero_()
                call()
            if not torch.equal(out if result is None else result, expected):
                sys.exit(f"{peer} differs from bitsandbytes: not timed")
        calls[peer] = call, launches
    return calls


def _by(way: Call, tensors: Call) -> Call:
    return lambda operands, out: way(tensors(operands, out))


def _time(
    calls: dict[str, tuple[Call, dict[Any, Any]]], device: torch.device, *, rounds: int, count: int
) -> tuple[dict[str, harness.Timing], dict[str, harness.Timing]]:
    """Return the seconds per call until it is queued, and until the device has finished."""
    queued: dict[str, list[float]] = {peer: [] for peer in calls}
    finished: dict[str, list[float]] = {peer: [] for peer in calls}
    with torch.no_grad():
        for order in harness.rotations(list(calls), rounds):
            for peer in order:
                call, launches = calls[peer]
                with mock.patch.object(PREPARED, "launches", launches):
                    for _ in range(count // 10):  # warms up what a neighbour left cold
                        call()
                    harness.synchronize(device)
                    start = time.perf_counter()
                    for _ in range(count):
                        call()
                    queued[peer].append((time.perf_counter() - start) / count)
                    harness.synchronize(device)
                    finished[peer].append((time.perf_counter() - start) / count)
    return _timings(queued), _timings(finished)


def _timings(samples: dict[str, list[float]]) -> dict[str, harness.Timing]:
    return {peer: harness.Timing.of(seconds) for peer, seconds in samples.items()}


if __name__ == "__main__":
    main()
