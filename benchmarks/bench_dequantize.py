"""Dequantize one NF4 weight to bf16: the qfuse op, the compiled graph, bitsandbytes, a copy.

The copy moves as many bytes as the dequantization must (packed codes and scales in, bf16 out), so
it is the time no dequantization can beat. Every peer is checked bitwise against bitsandbytes first.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import harness
from inductor_q import testing

SHAPES = {
    "cuda": [(1024, 1024), (4096, 4096), (4096, 11_008), (12_288, 4096), (16_384, 16_384)],
    "cpu": [(1024, 1024), (2048, 2048), (4096, 2048)],
}
QUICK = {"cuda": [(12_288, 4096)], "cpu": [(256, 256)]}
PEERS = ("copy", "bitsandbytes", "op", "inductor", "qfuse")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__, peers=PEERS)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--quant-type", choices=("nf4", "fp4"), default="nf4")
    parser.add_argument("--plain", action="store_true", help="fp32 absmax, no double quantization")
    parser.add_argument("--blocksize", type=int, default=64)
    parser.add_argument("--shapes", nargs="+", metavar="NxK")
    arguments = parser.parse_args(argv)
    suite = harness.start("bench_dequantize", arguments)
    shapes = (QUICK if arguments.quick else SHAPES)[suite.device.type]
    if arguments.shapes:
        shapes = [(int(n), int(k)) for n, k in (shape.split("x") for shape in arguments.shapes)]
    peers = harness.available(arguments.backends)
    suite.settings |= {
        "format": arguments.quant_type,
        "nested": not arguments.plain,
        "blocksize": arguments.blocksize,
        "dtype": arguments.dtype,
    }
    for n, k in shapes:
        _run_shape(suite, arguments, peers, n, k)
    harness.finish(suite, arguments)
    return suite


def _run_shape(
    suite: harness.Suite, arguments: argparse.Namespace, peers: Sequence[str], n: int, k: int
) -> None:
    device, dtype = suite.device, DTYPES[arguments.dtype]
    weight = torch.randn(n, k, device=device, dtype=dtype) * k**-0.5
    linear = testing.quantized_linear(
        weight,
        quant_type=arguments.quant_type,
        nested=not arguments.plain,
        blocksize=arguments.blocksize,
        compute_dtype=dtype,
    )
    packed, state = linear.weight.data, linear.weight.quant_state
    dequantize_4bit = testing.bitsandbytes().functional.dequantize_4bit
    expected = dequantize_4bit(packed, state)
    moved = _bytes(packed, state) + expected.nbytes
    # Reads half of the bytes and writes the other half.
    source = torch.randint(0, 255, (moved // 2,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def from_state(packed: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = dequantize_4bit(packed, state)
        return out

    candidates: dict[str, Callable[[], object]] = {}
    extra: dict[str, dict[str, Any]] = {}
    torch.compiler.reset()
    for peer in peers:
        call: Callable[[], Any]
        if peer == "copy":
            candidates[peer] = lambda: target.copy_(source)
            continue
        if peer == "bitsandbytes":
            call = functools.partial(dequantize_4bit, packed, state)
        elif peer == "op":
            op = _op(packed, state, dtype)
            if op is None:
                continue
            call = op
        else:
            call = functools.partial(harness.compile_as(peer, from_state), packed)
        with torch.no_grad():
            seconds = harness.first_call(call, device)
            out = call()
        if out.shape != expected.shape or not torch.equal(out, expected):
            sys.exit(f"{peer} at {n}x{k} differs from bitsandbytes: not timed")
        candidates[peer] = call
        extra[peer] = {"first_call_s": seconds, "bitwise": True}
    del expected
    with torch.no_grad():
        timings = harness.time_kernels(candidates, device, rounds=arguments.rounds or 5)
    for peer, timing in timings.items():
        extra.setdefault(peer, {})["gbps"] = moved / timing.median / 1e9
    case = {"N": n, "K": k}
    suite.add(case, timings, roof=suite.ceilings.roof(bytes=moved), extra=extra)
    if "bitsandbytes" in timings:
        for peer in ("op", "qfuse"):
            if peer in timings:
                ratio = suite.ratio(case, "bitsandbytes", peer)
                suite.notes.append(f"{n}x{k}: {peer} is {ratio:.2f}x as fast as bitsandbytes")


def _bytes(packed: torch.Tensor, state: Any) -> int:
    total: int = packed.nbytes + state.absmax.nbytes
    if state.nested:
        total += state.state2.absmax.nbytes + state.state2.code.nbytes
    return total


def _op(packed: torch.Tensor, state: Any, dtype: torch.dtype) -> Callable[[], Any] | None:
    """Return ``inductor_q.ops.dequantize`` on this weight; None where the package has no ops."""
    try:
        from inductor_q import ops
        from inductor_q.capture.bnb_state import bnb_operands
    except ImportError as error:
        harness.console.print(f"[yellow]without op: {error}")
        return None
    operands, format, shape = bnb_operands(packed, state)
    return lambda: ops.dequantize(operands, format, shape, dtype)


if __name__ == "__main__":
    main()
