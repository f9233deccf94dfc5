"""Time a linear layer of a few rows with a packed weight: `qfuse::linear` and what else there is.

``bitsandbytes`` is `matmul_4bit`, ``stock`` the same under Inductor; ``decode`` dequantizes and
multiplies; ``dense`` multiplies with a weight of 16 bits that is not quantized. The roof is the
time of reading the packed weight once. Weights are nf4, nested. The cache is flushed before each
call.
"""

from __future__ import annotations

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
    harness.finish(suite, arguments, extras=("error",))
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
    packed = float(sum(t.nbytes for t in operands))
    case = {"shape": "x".join(map(str, shape)), "rows": x.shape[0]}
    suite.add(case, timings, roof=suite.ceilings.roof(bytes=packed), extra=extra)


if __name__ == "__main__":
    main()
