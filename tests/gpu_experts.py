"""What every provider of scatter2scatter must show on a GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from tests.moe import Layer, results


def assert_as_near_as_the_loop(cases: Iterable[Layer], provider: str) -> None:
    """As near to float64 as a loop in the same dtype, over several layers, one being chance."""
    ours: dict[str, float] = defaultdict(float)
    peer: dict[str, float] = defaultdict(float)
    for case in cases:
        exact = case.double()
        truth = results(exact, exact.loop())
        for total, y in ((ours, case(provider=provider)), (peer, case.loop())):
            for name, value in results(case, y).items():
                total[name] += float((value.double() - truth[name]).square().sum())
    assert peer and all(ours[name] <= 1.25**2 * peer[name] for name in peer), (ours, peer)


def assert_zero_where_nobody_is(case: Layer, provider: str) -> None:
    """Nobody's rows, and gradients of experts without rows; `case` has both."""
    got = results(case, case(provider=provider))
    offsets = case.routing.offsets
    assert (got["y"][offsets[-1] :] == 0).all() and len(got["y"]) > offsets[-1]
    empty = offsets.diff() == 0
    assert empty.any()
    assert (got["lora_a"][empty] == 0).all() and (got["lora_b"][empty] == 0).all()


def assert_never_synchronizes_and_is_captured(case: Layer, provider: str) -> None:
    with torch.no_grad():
        expected = case(provider=provider)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            case(provider=provider)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = case(provider=provider)
        y.fill_(7)
        graph.replay()
    assert torch.equal(y, expected)
