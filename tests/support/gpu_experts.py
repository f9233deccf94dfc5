"""Assert what every provider of scatter2scatter must show on a GPU."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from tests.support.moe import Layer, cotangent, results


def assert_as_near_as_the_loop(
    cases: Iterable[Layer], *providers: str
) -> dict[str, dict[str, float]]:
    """Assert errors to float64 like a loop's in the same dtype; several layers, as one is chance.

    Returns the norm-relative errors, by provider and result.
    """
    off: dict[str, dict[str, float]] = {name: defaultdict(float) for name in (*providers, "loop")}
    norm: dict[str, float] = defaultdict(float)
    for case in cases:
        exact = case.double()
        truth = results(exact, exact.loop())
        for name, value in truth.items():
            norm[name] += float(value.square().sum())
        for provider, total in off.items():
            y = case.loop() if provider == "loop" else case(provider=provider)
            for name, value in results(case, y).items():
                total[name] += float((value.double() - truth[name]).square().sum())
    peer = off.pop("loop")
    for provider, ours in off.items():
        assert peer and all(ours[name] <= 1.25**2 * peer[name] for name in peer), (
            provider, ours, peer,
        )  # fmt: skip
    return {p: {name: (ours[name] / norm[name]) ** 0.5 for name in ours} for p, ours in off.items()}


def assert_zero_where_nobody_is(case: Layer, provider: str) -> None:
    """Assert zeros in nobody's rows and gradients of experts without rows; `case` has both."""
    got = results(case, case(provider=provider))
    offsets = case.routing.offsets
    assert (got["y"][offsets[-1] :] == 0).all() and len(got["y"]) > offsets[-1]
    empty = offsets.diff() == 0
    assert empty.any()
    assert (got["lora_a"][empty] == 0).all() and (got["lora_b"][empty] == 0).all()


@contextlib.contextmanager
def waits_are_errors() -> Iterator[None]:
    """Raise from whatever waits for the device, in backward's thread too."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_never_synchronizes_and_is_captured(case: Layer, provider: str) -> None:
    """Run forward and backward without a wait; a replayed graph gives every result again."""
    grad = cotangent(case(provider=provider))

    def step() -> dict[str, Tensor]:
        return results(case, case(provider=provider), grad)

    expected = step()
    with waits_are_errors():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for value in got.values():
        value.fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    assert {name: torch.equal(got[name], expected[name]) for name in got} == dict.fromkeys(
        expected, True
    )
