"""Time the kernels of an adapter's products alone, beside what torch has for them.

``adapter_grads`` is what backward multiplies with the gradient dY [M, N] of a layer: `dY (s B)`,
the gradient of the projection p, and `s (dY' p)`, that of B. ``qfuse`` reads dY once for both.
``torch`` has two products and two multiplications by the scaling s, all into given memory.
``add_product`` adds `s (p B')` to a layer's output [M, N] in place: `qfuse::add_product_`, and
torch's `addmm_`. On a GPU torch's products are those of cuBLAS.

The roof is the time of moving each operand and each result once, at the rate of a copy. ``gbps`` is
what a peer reaches of that; bytes that it moves twice, or to memory of its own, do not count.
``scratch_bytes`` is that memory. ``served_by`` is the provider of qfuse that serves the call, and
``refused`` says why that is not the first of the list. Results are compared with float64 before
they are timed: ``error`` is that of the worse one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness
from inductor_q.kernels import PROVIDERS
from inductor_q.kernels.calls import AdapterGrads, AddProduct, Call
from inductor_q.kernels.dispatch import served_by
from inductor_q.kernels.provider import against
from inductor_q.lowerings.calls import qfuse_adapter_grads
from inductor_q.ops.add_product import add_product_
from inductor_q.testing import relative_error

PEERS = ("torch", "qfuse")
SCALING = 2.0
ROWS = {"cuda": (512, 2048, 4096, 16384), "cpu": (256,)}
COLUMNS = {"cuda": (1024, 4096, 12288), "cpu": (512,)}
RANKS = (16, 32, 64)

#: What each peer calls, the call as a kernel gets it, and the results with what they should be.
Product = tuple[dict[str, Callable[[], object]], Call, list[tuple[Tensor, Tensor]]]


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__, peers=PEERS)
    parser.add_argument("--ops", nargs="+", choices=list(OPS), default=list(OPS))
    parser.add_argument("--rows", nargs="+", type=int, help="M")
    parser.add_argument("--columns", nargs="+", type=int, help="N")
    parser.add_argument("--ranks", nargs="+", type=int)
    arguments = parser.parse_args(argv)
    suite = harness.start("bench_adapter", arguments)
    kind = suite.device.type
    suite.settings |= {"dtype": "bf16", "scaling": SCALING}
    rows = arguments.rows or ((64,) if arguments.quick else ROWS[kind])
    columns = arguments.columns or ((128,) if arguments.quick else COLUMNS[kind])
    ranks = arguments.ranks or ((16,) if arguments.quick else RANKS)
    for case in itertools.product(arguments.ops, columns, rows, ranks):
        _measure(suite, arguments, *case)
    harness.finish(suite, arguments, extras=("gbps", "scratch_bytes", "refused"))
    return suite


def _measure(
    suite: harness.Suite, arguments: Any, op: str, columns: int, rows: int, rank: int
) -> None:
    device = suite.device

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    wide, p, b = random(rows, columns), random(rows, rank), random(columns, rank)
    calls, call, results = OPS[op](wide, p, b)
    calls = {peer: calls[peer] for peer in arguments.backends}
    moved = float(sum(t.nbytes for t in (wide, p, b)) + sum(t.nbytes for t, _ in results))
    extra: dict[str, dict[str, Any]] = {}
    before = [result.clone() for result, _ in results]
    for peer, run in calls.items():
        for (result, _), was in zip(results, before, strict=True):
            result.copy_(was)
        run()
        extra[peer] = {"error": max(relative_error(*pair) for pair in results)}
        extra[peer]["scratch_bytes"] = _scratch_bytes(run, device)
    if "qfuse" in extra:
        extra["qfuse"] |= _provider(op, call)
    del results, before  # float64
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    timings = harness.time_kernels(calls, device, rounds=rounds, budget=0.01)
    for peer, timing in timings.items():
        extra[peer]["gbps"] = moved / timing.median / 1e9
    flops = 2.0 * rows * columns * rank * (2 if op == "adapter_grads" else 1)
    case = {"op": op, "N": columns, "M": rows, "rank": rank}
    suite.add(case, timings, roof=suite.ceilings.roof(bytes=moved, flops=flops), extra=extra)


def _scratch_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Return the device memory that a call takes beyond what lives before it; None on CPU."""
    if device.type != "cuda":
        return None
    run()  # what compiles may take more
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.max_memory_allocated(device) - held


def _provider(op: str, call: Call) -> dict[str, str]:
    """Say who serves a call, and what stands against the provider that comes first."""
    first = PROVIDERS[op][call.device.type][0]
    found = {"served_by": served_by(op, call)}
    return found if found["served_by"] == first.name else found | {"refused": against(first, call)}


def _adapter_grads(grad: Tensor, p: Tensor, b: Tensor) -> Product:
    of_p, of_b = torch.empty_like(p), torch.empty_like(b)

    def by_torch() -> None:
        torch.mm(grad, b * SCALING, out=of_p)
        torch.mm(grad.t(), p, out=of_b).mul_(SCALING)

    calls: dict[str, Callable[[], object]] = {
        "torch": by_torch,
        "qfuse": lambda: qfuse_adapter_grads(grad, p, b, of_b, SCALING, SCALING, out=of_p),
    }
    exact = grad.double()
    results = [(of_p, SCALING * (exact @ b.double())), (of_b, SCALING * (exact.t() @ p.double()))]
    return calls, AdapterGrads(grad, p, b, SCALING, SCALING, of_p, of_b), results


def _add_product(base: Tensor, p: Tensor, b: Tensor) -> Product:
    right = b.t()  # as it lies in memory
    calls: dict[str, Callable[[], object]] = {
        "torch": lambda: base.addmm_(p, right, alpha=SCALING),
        "qfuse": lambda: add_product_(base, p, right, SCALING),
    }
    exact = torch.addmm(base.double(), p.double(), right.double(), alpha=SCALING)
    return calls, AddProduct(base, p, right, SCALING), [(base, exact)]


OPS: dict[str, Callable[[Tensor, Tensor, Tensor], Product]] = {
    "adapter_grads": _adapter_grads,
    "add_product": _add_product,
}


if __name__ == "__main__":
    main()
