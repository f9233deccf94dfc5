"""Measure what a function allocates on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile


def most_beside(run: Callable[[], Sequence[Tensor]]) -> int:
    """Return how many bytes `run` has at most beyond what it returns."""
    run()  # what is made once is made
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        returned = run()
    found: Any = profiler.profiler
    events = [e for e in found.kineto_results.events() if e.name() == "[memory]"]
    taken = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        taken += event.nbytes()
        most = max(most, taken)
    assert taken == sum(tensor.nbytes for tensor in returned)  # no event is missing
    return most - taken
