"""Time one NF4 linear under a LoRA adapter (r = 16): forward, and forward with backward.

Peers are the same bitsandbytes + PEFT module in eager, under stock Inductor and under qfuse, beside
the plain bf16 product of the same size (``matmul``: no adapter, the weight not packed). Each
result is compared with float64 first; ``error`` is relative to eager's own error.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import harness
from inductor_q import testing

# (N, K, M). The CUDA rows are the projections of Qwen3-8B, from decoding to training.
SHAPES = {
    "cuda": [
        (12_288, 4096, 1),
        (12_288, 4096, 4),
        (12_288, 4096, 16),
        (12_288, 4096, 64),
        (12_288, 4096, 256),
        (12_288, 4096, 1024),
        (12_288, 4096, 4096),
        (4096, 4096, 4096),
        (4096, 12_288, 4096),
    ],
    "cpu": [
        (1024, 1024, 1),
        (1024, 1024, 16),
        (1024, 1024, 128),
        (1024, 1024, 512),
        (2816, 1024, 512),
        (1024, 2816, 512),
    ],
}
QUICK = {"cuda": [(12_288, 4096, 1), (12_288, 4096, 4096)], "cpu": [(64, 64, 1), (64, 64, 128)]}
PEERS = ("matmul", *harness.PEERS)
RANK = 16
TRAIN_FROM = 128  # rows from which the backward is measured too: nobody trains on fewer


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__, peers=PEERS)
    parser.add_argument("--adapter-dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--shapes", nargs="+", metavar="NxKxM")
    parser.add_argument("--pass", dest="passes", nargs="+", choices=("forward", "both"))
    arguments = parser.parse_args(argv)
    suite = harness.start("bench_linear", arguments)
    shapes = (QUICK if arguments.quick else SHAPES)[suite.device.type]
    if arguments.shapes:
        shapes = [(int(n), int(k), int(m)) for n, k, m in (s.split("x") for s in arguments.shapes)]
    suite.settings |= {"rank": RANK, "adapter_dtype": arguments.adapter_dtype, "format": "nf4"}
    peers = harness.available(arguments.backends)
    for n, k, m in shapes:
        for kind in ("forward", "both"):
            if kind in (arguments.passes or ("forward", "both")) and (
                kind == "forward" or m >= TRAIN_FROM
            ):
                _run_case(suite, arguments, peers, (n, k, m), backward=kind == "both")
    harness.finish(suite, arguments, extras=("error_to_eager",))
    return suite


def _run_case(
    suite: harness.Suite,
    arguments: argparse.Namespace,
    peers: Sequence[str],
    shape: tuple[int, int, int],
    *,
    backward: bool,
) -> None:
    n, k, m = shape
    device = suite.device
    adapter_dtype = torch.bfloat16 if arguments.adapter_dtype == "bf16" else None
    torch.compiler.reset()  # one compiled variant per shape would reach the recompile limit
    module = testing.lora_linear(n, k, r=RANK, adapter_dtype=adapter_dtype, device=device)
    module.train(backward)
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16, requires_grad=backward)
    grad = torch.randn(m, n, device=device, dtype=torch.bfloat16)
    inputs = [x, *testing.adapter_parameters(module)]

    def run(call: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        if not backward:
            with torch.no_grad():
                return [call(x)]
        y = call(x)
        return [y, *torch.autograd.grad(y, inputs, grad)]

    exact = _exact(module, x, grad, backward=backward)
    candidates: dict[str, Callable[[], object]] = {}
    extra: dict[str, dict[str, Any]] = {}
    for peer in peers:
        if peer == "matmul":
            candidates[peer] = _matmul(n, k, x, grad, backward=backward)
            continue
        call = harness.compile_as(peer, module)
        candidates[peer] = functools.partial(run, call)
        seconds = harness.first_call(candidates[peer], device)
        errors = [testing.relative_error(a, b) for a, b in zip(run(call), exact, strict=True)]
        extra[peer] = {"first_call_s": seconds, "errors": errors}
        if backward and device.type == "cuda":
            extra[peer]["peak_bytes"] = harness.peak_bytes(candidates[peer], device)
        if backward:
            saved = testing.count_saved_bytes(functools.partial(call, x), module)
            extra[peer]["saved_bytes"] = saved.total
    if "eager" in extra:
        eager = extra["eager"]["errors"]
        for values in extra.values():
            pairs = zip(values["errors"], eager, strict=True)
            values["error_to_eager"] = max(one / other for one, other in pairs)
    timings = harness.time_kernels(candidates, device, rounds=arguments.rounds or 5)
    case = {"N": n, "K": k, "M": m, "pass": "fwd+bwd" if backward else "fwd"}
    suite.add(case, timings, roof=_roof(suite.ceilings, shape, backward=backward), extra=extra)


def _exact(
    module: torch.nn.Module, x: torch.Tensor, grad: torch.Tensor, *, backward: bool
) -> list[torch.Tensor]:
    reference = testing.reference_model(module)
    x64 = x.detach().double().requires_grad_(backward)
    y = reference(x64)
    if not backward:
        return [y.detach()]
    inputs = [x64, *testing.adapter_parameters(reference)]
    return [y.detach(), *torch.autograd.grad(y, inputs, grad.double())]


def _matmul(
    n: int, k: int, x: torch.Tensor, grad: torch.Tensor, *, backward: bool
) -> Callable[[], object]:
    weight = torch.randn(n, k, device=x.device, dtype=x.dtype) * k**-0.5
    x = x.detach()
    if backward:
        return lambda: (x @ weight.t(), grad @ weight)
    return lambda: x @ weight.t()


def _roof(ceilings: harness.Ceilings, shape: tuple[int, int, int], *, backward: bool) -> float:
    """Count the fewest operations and bytes: packed weight once per pass, x in, y out, adapters."""
    n, k, m = shape
    weight = n * k / 2 + n * k / 64  # codes, and one byte of absmax per 64 values
    adapters = 2 * RANK * (n + k)
    forward = ceilings.roof(
        flops=2 * m * n * k + 2 * m * RANK * (n + k), bytes=weight + adapters + 2 * m * (n + k)
    )
    if not backward:
        return forward
    # dY W, dY B, (dY B) A, and the two Gram products of dA and dB.
    flops = 2 * m * n * k + 2 * m * RANK * (n + k) + 2 * m * RANK * (n + k)
    moved = weight + 2 * adapters + 2 * m * (n + 2 * k)  # dY and x in, dX out
    return forward + ceilings.roof(flops=flops, bytes=moved)


if __name__ == "__main__":
    main()
