"""Time a linear layer of a few rows with a packed weight: `qfuse::linear` and what else there is.

``bitsandbytes`` is `matmul_4bit`, ``stock`` the same under Inductor; ``decode`` dequantizes and
multiplies; ``dense`` multiplies with a weight of 16 bits that is not quantized. The roof is the
time of reading the packed weight once. Weights are nf4, nested. The cache is flushed before each
call, which is timed alone. ``graph_s`` is the time of a call in a CUDA graph of many, whose weights
together exceed the cache, as decoding has them: free of what starting one kernel alone costs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import harness
from inductor_q import ops, testing
from inductor_q.capture.bnb_state import bnb_operands
from inductor_q.kernels import linear_rows_cuda

PEERS = ("bitsandbytes", "decode", "dense", "stock", "qfuse")
FORMAT = "nf4_b64_nested"
#: Output and input features.
SHAPES = {
    "cuda": ((12288, 4096), (4096, 12288), (4096, 4096), (1024, 4096)),
    "cpu": ((4096, 4096),),
}
ROWS = {"cuda": (1, 2, 4, 8, 16, 24, 32, 48, 64), "cpu": (1, 2, 4, 8, 16, 32)}
QUICK = ((96, 128),)
#: Bytes of the weights of a graph: several times the cache of a GPU.
GRAPH_BYTES = 256 << 20


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    arguments = harness.parser(__doc__, peers=PEERS).parse_args(argv)
    suite = harness.start("bench_rows", arguments)
    kind = suite.device.type
    for shape in QUICK if arguments.quick else SHAPES[kind]:
        weight = torch.randn(shape, device=suite.device).bfloat16() * 0.02
        layer = testing.quantized_linear(weight).eval()
        for rows in (1, 3) if arguments.quick else ROWS[kind]:
            x = torch.randn(rows, shape[1], device=suite.device).bfloat16()
            _measure(suite, arguments, layer, weight, x)
    harness.finish(suite, arguments, extras=("error", "graph_s"))
    return suite


def _measure(suite: harness.Suite, arguments: Any, layer: Any, weight: Tensor, x: Tensor) -> None:
    operands, _, shape = bnb_operands(layer.weight.data, layer.weight.quant_state)
    torch.compiler.reset()  # past some recompiles it would be eager
    stock: Callable[[Tensor], Tensor] = torch.compile(layer, backend="inductor", dynamic=False)
    with torch.no_grad():
        exact = x.double() @ ops.dequantize(operands, FORMAT, shape, torch.float32).double().t()
        peers: dict[str, Callable[[], Tensor]] = {
            "bitsandbytes": lambda: layer(x),
            "decode": lambda: F.linear(x, ops.dequantize(operands, FORMAT, shape, x.dtype)),
            "dense": lambda: F.linear(x, weight),
            "stock": lambda: stock(x),
            "qfuse": lambda: ops.linear(x, operands, FORMAT, shape),
        }
        calls = {name: peers[name] for name in arguments.backends}
        if x.shape[0] > linear_rows_cuda.MOST_ROWS:
            calls.pop("qfuse", None)  # it decodes
        extra = {
            name: {"error": float((call().double() - exact).norm() / exact.norm())}
            for name, call in calls.items()
            if name != "dense"  # another weight
        }
        rounds = arguments.rounds or 3
        timings = harness.time_kernels(calls, suite.device, rounds=rounds, budget=0.02)
        if suite.device.type == "cuda":
            for name, seconds in _in_graphs(arguments.backends, layer, weight, x, rounds).items():
                if name in calls:
                    extra.setdefault(name, {})["graph_s"] = seconds
    packed = float(sum(t.nbytes for t in operands))
    case = {"shape": "x".join(map(str, shape)), "rows": x.shape[0]}
    suite.add(case, timings, roof=suite.ceilings.roof(bytes=packed), extra=extra)


def _in_graphs(
    names: Sequence[str], layer: Any, weight: Tensor, x: Tensor, rounds: int
) -> dict[str, float]:
    """Return the seconds of a call in a CUDA graph of many, by peer; stock has no such graph."""
    operands, _, shape = bnb_operands(layer.weight.data, layer.weight.quant_state)
    packed = sum(t.nbytes for t in operands)
    layers = [copy.deepcopy(layer) for _ in range(-(-GRAPH_BYTES // packed))]
    copies = [bnb_operands(each.weight.data, each.weight.quant_state)[0] for each in layers]

    def decoded(each: Sequence[Tensor]) -> Tensor:
        return F.linear(x, ops.dequantize(each, FORMAT, shape, x.dtype))

    dense = [weight.clone() for _ in range(-(-GRAPH_BYTES // weight.nbytes))]
    calls: dict[str, list[Callable[[], Tensor]]] = {
        "bitsandbytes": [functools.partial(each, x) for each in layers],
        "decode": [functools.partial(decoded, each) for each in copies],
        "dense": [functools.partial(F.linear, x, each) for each in dense],
        "qfuse": [functools.partial(ops.linear, x, each, FORMAT, shape) for each in copies],
    }
    graphs = {name: harness.in_sequence(calls[name], x.device) for name in names if name in calls}
    timings = harness.time_kernels(graphs, x.device, rounds=rounds, budget=0.02)
    return {name: timing.median / len(calls[name]) for name, timing in timings.items()}


if __name__ == "__main__":
    main()
