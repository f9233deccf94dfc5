"""Time the loss of a language model with a frozen head, whole and in chunks of so many rows.

One call runs forward and backward to the hidden states: 4,096 tokens of Qwen3-8B on a GPU, 1,024 of
a small model on a CPU. ``whole`` is what stock Inductor makes of transformers' loss; the others are
`qfuse::linear_cross_entropy`, which the pass chunk_loss calls, with that many rows at a time.

``--head float32`` is a head that `prepare_model_for_kbit_training` has made float32. ``whole``
rounds it once and holds the copy, the others round parts of it, twice for each chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import harness
from inductor_q.ops.linear_cross_entropy import linear_cross_entropy

ROWS = (128, 512, 1024, 2048)
PEERS = ("whole", *map(str, ROWS))
#: Tokens, hidden features, vocabulary.
SHAPES = {"cuda": (4096, 4096, 151_936), "cpu": (1024, 512, 32_000)}
QUICK = (40, 16, 300)


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__, peers=PEERS)
    parser.add_argument("--head", choices=("float32",), help="its dtype, if not the inputs'")
    parser.add_argument("--tokens", type=int, nargs="+", help="default: 4096, on a CPU 1024")
    arguments = parser.parse_args(argv)
    suite = harness.start("bench_loss", arguments)
    tokens, *sizes = QUICK if arguments.quick else SHAPES[suite.device.type]
    on_gpu = suite.device.type == "cuda"
    dtypes = [torch.bfloat16] if on_gpu or arguments.head else [torch.bfloat16, torch.float32]
    head = torch.float32 if arguments.head else None
    for dtype in dtypes:
        for count in arguments.tokens or [tokens]:
            shape = (count, *sizes)
            _measure(suite, arguments.backends, arguments.rounds or 5, shape, dtype, head or dtype)
    harness.finish(suite, arguments, extras=("peak_bytes", "error"))
    return suite


def _measure(
    suite: harness.Suite,
    peers: Sequence[str],
    rounds: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    head_dtype: torch.dtype,
) -> None:
    tokens, features, vocabulary = shape
    hidden = torch.randn(tokens, features, device=suite.device, dtype=dtype).requires_grad_()
    head = torch.randn(vocabulary, features, device=suite.device, dtype=head_dtype) * 0.02
    labels = torch.randint(0, vocabulary, (tokens,), device=suite.device)
    whole = torch.compile(_whole, dynamic=False)

    def gradient(loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return lambda: torch.autograd.grad(loss(), hidden)[0]

    def chunked(rows: int) -> Tensor:
        given, elements = ([hidden], [head], None, labels, None), rows * vocabulary
        return linear_cross_entropy(*given, mean=True, ignore_index=-100, elements=elements)

    calls = {
        peer: gradient(
            functools.partial(whole, hidden, head, labels)
            if peer == "whole"
            else functools.partial(chunked, int(peer))
        )
        for peer in peers
    }
    exact = gradient(lambda: _whole(hidden, head, labels))().double()
    extra = {}
    for peer, call in calls.items():
        error = float((call().double() - exact).norm() / exact.norm())
        extra[peer] = {"error": error, "peak_bytes": harness.peak_bytes(call, suite.device)}
    timings = harness.time_kernels(calls, suite.device, rounds=rounds)
    products = 2 * 2.0 * tokens * features * vocabulary
    roof = suite.ceilings.roof(flops=products, bytes=float(2 * head.nbytes))
    case = {"shape": "x".join(map(str, shape)), "dtype": str(dtype).removeprefix("torch.")}
    if head_dtype != dtype:
        case["head"] = str(head_dtype).removeprefix("torch.")
    suite.add(case, timings, roof=roof, extra=extra)


def _whole(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, head.to(hidden.dtype)).float(), labels)


if __name__ == "__main__":
    main()
