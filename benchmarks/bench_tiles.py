"""Time tiles of scatter2scatter's Triton kernel, those nearest to the default, on this GPU.

Both projections of a mixture of experts run, NF4 with an adapter, forward and input gradient: this
is the evidence for `START` of `inductor_q.kernels.tiles`. Compiling is over before anything is
timed; a tile that cannot be compiled or launched here is left out, and logged.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from torch import Tensor

from benchmarks import bench_moe, harness
from inductor_q.capture.bnb_state import bnb_operands
from inductor_q.kernels import tiles
from inductor_q.kernels.expert_calls import Scatter2Scatter
from inductor_q.kernels.gpu import on
from inductor_q.kernels.scatter2scatter_triton import KERNEL, work
from inductor_q.log import log
from inductor_q.ops.routing import route

PEERS = ("default", "best")
RANK = 16
#: Whether it is the second projection's, and whether it is the input gradient.
PRODUCTS = {
    "up": (False, False),
    "down": (True, False),
    "up dX": (False, True),
    "down dX": (True, True),
}

#: How a bare RuntimeError of Triton begins where a tile is at fault: passes of the compiler that
#: fail, and CUDA's words for a launch that needs more registers or stack than there are.
_AT_FAULT = (
    "PassManager::run failed",
    "failed to translate module to LLVM IR",
    "Triton Error [CUDA]: too many resources requested for launch",
    "Triton Error [CUDA]: out of memory",
)


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__, peers=PEERS)
    parser.add_argument("--models", nargs="+", default=["Qwen3-30B-A3B"], choices=bench_moe.MODELS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 1024, 512, 64])
    parser.add_argument("--tiles", type=int, default=24, help="how many a product is tried with")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile")
    arguments = parser.parse_args(argv)
    suite = harness.start("bench_tiles", arguments)
    if suite.device.type == "cpu":
        parser.error("tiles are those of a GPU")
    suite.settings |= {"tokens": arguments.tokens, "tiles": arguments.tiles, "rank": RANK}
    cases = list(itertools.product(arguments.models, arguments.tokens, PRODUCTS))
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        device = str(suite.device)
        list(pool.map(_compile, cases, itertools.repeat(device), itertools.repeat(arguments.tiles)))
    for name, tokens, product in cases:
        call = make(name, tokens, product, suite.device)
        problem, limits = work(call), tiles.limits(suite.device)
        default = tiles.start(problem, limits)
        timed = {tile: milliseconds(call, tile) for tile in near(call, arguments.tiles)}
        best = min(timed, key=timed.__getitem__)
        suite.add(
            {"model": name, "T": tokens, "product": product},
            {
                peer: harness.Timing.of([timed[tile] / 1e3])
                for peer, tile in (("default", default), ("best", best))
            },
            roof=_roof(suite.ceilings, call),
            extra={"default": {"tile": repr(default)}, "best": {"tile": repr(best)}},
        )
        suite.notes.append(f"{problem}: {best},")
    harness.finish(suite, arguments)
    return suite


def make(name: str, tokens: int, product: str, device: torch.device) -> Scatter2Scatter:
    """Make one product of a layer."""
    import bitsandbytes.functional as F

    experts, n, k, top_k = bench_moe.sizes(name)
    second, backward = PRODUCTS[product]
    if second:
        n, k = k, n // 2
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).bfloat16()

    packed = F.quantize_4bit(random(experts * n, k), quant_type="nf4", compress_statistics=True)
    operands, format, _ = bnb_operands(*packed)
    ids = torch.randn(tokens, experts, device=device, generator=generator).topk(top_k).indices
    a, b = random(experts, RANK, k), random(experts, n, RANK)
    if backward:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    grouped_in = second != backward  # rows between the projections are grouped
    call = Scatter2Scatter(
        x=random(tokens * top_k if grouped_in else tokens, n if backward else k),
        operands=operands,
        format=format,
        shape=(experts, n, k),
        transposed=backward,
        **route(ids, experts)._asdict(),
        grouped_in=grouped_in,
        grouped_out=second == backward,
        lora_a=a,
        lora_b=b,
        scaling=2.0,
        bias=None,
        gates=None,
    )
    call.check()
    return call


def near(call: Scatter2Scatter, count: int) -> Iterator[tiles.Tile]:
    """List the tiles that fit, those next to the default first, which is one of them."""
    problem, limits = work(call), tiles.limits(call.x.device)
    default = tiles.start(problem, limits)
    fit = tiles.pruned(tiles.candidates(problem), problem, limits.shared_bytes)
    yield from sorted(fit, key=lambda tile: tiles.distance(tile, default))[:count]


def milliseconds(call: Scatter2Scatter, tile: tiles.Tile, *, runs: int = 25) -> float:
    """Time a whole call; infinite for a tile that cannot be compiled or launched here.

    Args:
        runs: how many milliseconds it is repeated for; with 0 it is compiled and launched once.
    """
    import triton
    from triton.runtime.errors import PTXASError

    launch = functools.partial(KERNEL.run, call, tile)
    try:
        if not runs:
            launch()
            return 0.0
        median: float = triton.testing.do_bench(launch, warmup=5, rep=runs, return_mode="median")
    except (triton.CompilationError, triton.OutOfResources, PTXASError, RuntimeError) as error:
        bare = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
        if bare and not str(error).startswith(_AT_FAULT):
            raise
        log.info("%s is left out: %s: %s", tile, type(error).__name__, error)
        return math.inf
    return median


def _roof(ceilings: harness.Ceilings, call: Scatter2Scatter) -> float:
    """Count the products, or the packed weights and the rows read and written once."""
    sides = call.in_features + call.out_features
    return ceilings.roof(
        flops=2.0 * call.rows * call.in_features * call.out_features,
        bytes=sum(t.nbytes for t in call.operands) + 2.0 * call.rows * sides,
    )


def _compile(case: tuple[str, int, str], device: str, count: int) -> None:
    """Compile a case into Triton's cache, by a launch."""
    call = make(*case, torch.device(device))
    with on(call.x.device):
        for tile in near(call, count):
            milliseconds(call, tile, runs=0)


if __name__ == "__main__":
    main()
