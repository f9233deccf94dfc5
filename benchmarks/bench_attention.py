"""Time attention under masks that are written out, or replaced by what they mean.

One call runs forward and backward on the shapes of Qwen3-8B. ``mask`` is what stock Inductor gets
up to torch 2.13; ``causal`` is what the pass causal_attention makes of it; ``grouped`` is causal
with keys and values that are not repeated for the groups of queries, as eager calls it. ``meant``
is what the pass makes of a mask of padding that hides nothing (valid positions first, then
grouped); in the other cases of packed documents and of a window (FlexAttention on a GPU). Its time
includes what layers share.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attend

from benchmarks import harness
from inductor_q.ops import attention

PEERS = ("mask", "causal", "grouped", "meant")
#: Sequences, heads of queries, heads of keys, positions, features of a head.
SHAPES = {"cuda": (2, 32, 8, 2048, 128), "cpu": (1, 4, 2, 256, 64)}
#: The second case: as many tokens or more in one sequence of eight documents.
PACKED = {"cuda": (1, 32, 8, 8192, 128), "cpu": (1, 4, 2, 512, 64)}
DOCUMENTS = 8
#: The third case: the share of positions that a sliding window shows.
WINDOW = 1 / 8


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    arguments = harness.parser(__doc__, peers=PEERS).parse_args(argv)
    suite = harness.start("bench_attention", arguments)
    device = suite.device.type
    _measure(suite, arguments, SHAPES[device])
    packed = [peer for peer in arguments.backends if peer in ("mask", "meant")]
    if packed:
        arguments.backends = packed
        _measure(suite, arguments, PACKED[device], documents=DOCUMENTS)
        _measure(suite, arguments, PACKED[device], window=int(PACKED[device][3] * WINDOW))
    harness.finish(suite, arguments, extras=("error",))
    return suite


def _measure(
    suite: harness.Suite,
    arguments: argparse.Namespace,
    shape: tuple[int, int, int, int, int],
    *,
    documents: int = 1,
    window: int | None = None,
) -> None:
    batch, heads, groups, length, features = shape

    def random(count: int) -> Tensor:
        size = (batch, count, length, features)
        return torch.randn(size, device=suite.device, dtype=torch.bfloat16).requires_grad_()

    query, key, value = random(heads), random(groups), random(groups)
    grad = torch.randn_like(query)
    place = torch.arange(length, device=suite.device)
    positions = place % (length // documents)
    same = (place // (length // documents))[:, None] == place // (length // documents)
    behind = place[:, None] - place
    mask = (same & (behind >= 0) & (behind < (window or length))).expand(batch, 1, -1, -1)
    valid = torch.ones(batch, length, dtype=torch.int64, device=suite.device)

    def repeated(x: Tensor) -> Tensor:
        wide = x[:, :, None].expand(-1, -1, heads // groups, -1, -1)
        return wide.reshape(batch, heads, length, features)

    calls: dict[str, Callable[[], Tensor]] = {
        "mask": lambda: attend(query, repeated(key), repeated(value), attn_mask=mask),
        "causal": lambda: attend(query, repeated(key), repeated(value), is_causal=True),
        "grouped": lambda: attend(query, key, value, is_causal=True, enable_gqa=True),
    }
    in_blocks = documents > 1 or window is not None
    meant: Callable[..., Tensor] = _in_blocks if in_blocks else _valid_first
    compiled = torch.compile(meant, dynamic=False)
    given = (positions[None] if documents > 1 else None, window) if in_blocks else (valid,)
    calls["meant"] = lambda: compiled(query, key, value, *given)

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
    pairs = float(mask.sum()) * heads  # two products forward, and five backward
    roof = suite.ceilings.roof(flops=14.0 * pairs * features, bytes=float(moved))
    case = {"shape": "x".join(map(str, shape)), "documents": documents, "window": window}
    suite.add(case, timings, roof=roof, extra=extra)


def _valid_first(query: Tensor, key: Tensor, value: Tensor, valid: Tensor) -> Tensor:
    order, inverse, is_valid = attention.valid_first(valid)
    moved = [attention.reorder(x, order, inverse) for x in (query, key, value)]
    out = attend(moved[0], moved[1], moved[2], is_causal=True, enable_gqa=True)
    return attention.restore(out, order, inverse, is_valid)


def _in_blocks(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor | None, window: int | None
) -> Tensor:
    batch, _, length, _ = query.shape
    tables = attention.block_tables(positions, None, batch, length, window, query.device)
    return attention.block_attention(query, key, value, tables, window, None)


if __name__ == "__main__":
    main()
