"""Assert what every provider of scatter2scatter must show on a GPU."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from inductor_q.kernels.provider import Provider
from tests.support.moe import Layer, Sizes, cotangent, results
from tests.support.tile_cases import FIT, on_gpu


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


def assert_serves_as_near_as_the_loop(kernel: Provider[Any], sizes: Sizes, **form: Any) -> None:
    """Assert that a provider takes layers of these sizes, with errors like a loop's."""
    cases = [on_gpu(sizes, seed=seed, **form) for seed in range(4)]
    assert all(not kernel.refuses(case.call()) for case in cases)
    assert_as_near_as_the_loop(cases, kernel.name)


def assert_serves_a_form(kernel: Provider[Any], **form: Any) -> None:
    """Assert the same of layers with biases and sentinels, and equal results of a second run."""
    sizes = replace(FIT, out_features=320)
    form |= {"bias": True, "sentinel": -1}
    assert_serves_as_near_as_the_loop(kernel, sizes, **form)
    case = on_gpu(sizes, **form)
    first, second = (results(case, case(provider=kernel.name)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


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
