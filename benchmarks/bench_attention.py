"""Time attention under a causal mask that is written out, or left out.

One call runs forward and backward on the shapes of Qwen3-8B. ``mask`` is what stock Inductor gets
up to torch 2.13; ``causal`` is what the pass causal_attention makes of it; ``grouped`` is causal
with keys and values that are not repeated for the groups of queries, as eager calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attend

from benchmarks import harness

PEERS = ("mask", "causal", "grouped")
#: Sequences, heads of queries, heads of keys, positions, features of a head.
SHAPES = {"cuda": (2, 32, 8, 2048, 128), "cpu": (1, 4, 2, 256, 64)}


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    arguments = harness.parser(__doc__, peers=PEERS).parse_args(argv)
    suite = harness.start("bench_attention", arguments)
    shape = SHAPES[suite.device.type]
    batch, heads, groups, length, features = shape

    def random(count: int) -> Tensor:
        size = (batch, count, length, features)
        return torch.randn(size, device=suite.device, dtype=torch.bfloat16).requires_grad_()

    query, key, value = random(heads), random(groups), random(groups)
    grad = torch.randn_like(query)
    mask = torch.ones(length, length, dtype=torch.bool, device=suite.device).tril()
    mask = mask.expand(batch, 1, -1, -1)

    def repeated(x: Tensor) -> Tensor:
        wide = x[:, :, None].expand(-1, -1, heads // groups, -1, -1)
        return wide.reshape(batch, heads, length, features)

    calls: dict[str, Callable[[], Tensor]] = {
        "mask": lambda: attend(query, repeated(key), repeated(value), attn_mask=mask),
        "causal": lambda: attend(query, repeated(key), repeated(value), is_causal=True),
        "grouped": lambda: attend(query, key, value, is_causal=True, enable_gqa=True),
    }

    def both(call: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(call(), (query, key, value), grad)

    with torch.no_grad():
        exact = calls["mask"]().double()
        extra = {
            peer: {"error": float((calls[peer]().double() - exact).norm() / exact.norm())}
            for peer in arguments.backends
        }
    candidates = {peer: both(calls[peer]) for peer in arguments.backends}
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    timings = harness.time_kernels(candidates, suite.device, rounds=rounds)
    moved = 4 * (query.nbytes + key.nbytes)  # read and written once per direction, at least
    roof = suite.ceilings.roof(
        flops=7.0 * batch * heads * length * length * features, bytes=float(moved)
    )
    suite.add({"shape": "x".join(map(str, shape))}, timings, roof=roof, extra=extra)
    harness.finish(suite, arguments, extras=("error",))
    return suite


if __name__ == "__main__":
    main()
