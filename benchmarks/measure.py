"""Measure peers side by side, ceilings and memory.

Rules that the functions here enforce:

- Peers are timed in the same process in interleaved rounds, in an order that rotates: what drifts
  (clocks, neighbours) hits all of them. A number is the median; the 20th and 80th percentile say
  how far to trust it, and the shortest sample is kept for machines that are shared.
- Kernels: device events around each call, the cache flushed before it, and the device kept busy
  until the host has queued everything, so launch gaps of Python code are not counted as GPU time.
- Steps: the host clock around whole blocks of steps, synchronized at both ends.
- Where several benchmarks run side by side (`benchmarks.together`), one measures at a time.
- Ceilings (a large copy, a large matrix product) are measured in the same run; a roof is the larger
  of bytes over the one and operations over the other.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.alone import alone

WARMUP = 3  # calls of a peer before it is timed
MAX_SAMPLES = 200  # of a peer in a round


@dataclass(frozen=True)
class Timing:
    """Hold seconds per call: median of all samples, 20th and 80th percentile, and the shortest."""

    median: float
    low: float
    high: float
    best: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        ordered = sorted(samples)
        last = len(ordered) - 1
        return cls(
            median=statistics.median(ordered),
            low=ordered[round(0.2 * last)],
            high=ordered[round(0.8 * last)],
            best=ordered[0],
            samples=len(ordered),
        )

    def per(self, calls: int) -> Timing:
        """Return the timing per call, where a sample was ``calls`` of them."""
        seconds = {name: value / calls for name, value in asdict(self).items() if name != "samples"}
        return replace(self, **seconds)


@dataclass(frozen=True)
class Ceilings:
    """Hold what this device reached on a large copy and matrix product, minutes ago at most."""

    copy_gbps: float
    matmul_tflops: float

    def roof(self, *, flops: float = 0.0, bytes: float = 0.0) -> float:
        """Return the seconds below which no version can go."""
        return max(flops / (self.matmul_tflops * 1e12), bytes / (self.copy_gbps * 1e9))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rotations(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    for index in range(rounds):
        shift = index % len(names)
        yield [*names[shift:], *names[:shift]]


def time_kernels(
    candidates: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int = 5,
    budget: float = 0.25,
) -> dict[str, Timing]:
    """Measure device time per call, the cache flushed before each.

    A peer takes about ``budget`` seconds per round. On a GPU a peer's calls of a round are queued
    together, on a CPU peers take turns call by call.
    """
    flush = torch.empty(
        (256 if device.type == "cuda" else 64) << 20, dtype=torch.uint8, device=device
    )
    sample = _cuda_sample if device.type == "cuda" else _cpu_sample
    counts: dict[str, int] = {}
    host: dict[str, float] = {}
    for name, call in candidates.items():
        for _ in range(WARMUP):
            call()
        synchronize(device)
        with alone():
            start = time.perf_counter()
            flush.zero_()
            call()
            synchronize(device)
            once = time.perf_counter() - start
            start = time.perf_counter()
            call()
            host[name] = time.perf_counter() - start  # on a GPU: how long the host takes to queue
        counts[name] = min(MAX_SAMPLES, max(3, int(budget / max(once, 1e-6))))
        synchronize(device)
    if device.type == "cpu":  # peers take turns by call: neighbours come and go within a round
        rounds, counts = rounds * min(counts.values()), dict.fromkeys(counts, 1)
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    with alone():
        for order in rotations(list(candidates), rounds):
            for name in order:
                samples[name] += sample(candidates[name], flush, counts[name], host[name])
    return {name: Timing.of(values) for name, values in samples.items()}


def _cuda_sample(
    call: Callable[[], object], flush: torch.Tensor, count: int, host: float
) -> list[float]:
    # Spin on the device for longer than the host needs to queue the call: then the events enclose
    # the kernels and nothing else. Cycles at 2 GHz; a slower clock only spins longer.
    cycles = int(min(host * 1.5 + 2e-5, 2e-2) * 2e9)
    cuda: Any = torch.cuda  # its annotations are partial
    events = [
        (cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in range(count)
    ]
    for start, end in events:
        flush.zero_()
        cuda._sleep(cycles)
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e-3 for start, end in events]


def _cpu_sample(
    call: Callable[[], object], flush: torch.Tensor, count: int, host: float
) -> list[float]:
    values = []
    for _ in range(count):
        flush.zero_()
        start = time.perf_counter()
        call()
        values.append(time.perf_counter() - start)
    return values


def in_sequence(
    calls: Sequence[Callable[[], object]], device: torch.device
) -> Callable[[], object]:
    """Make one call of all ``calls``, in order: on a GPU a graph, whose launches no host delays.

    On buffers that together exceed the cache it shows what a kernel sustains, free of the few
    microseconds in which a single launch starts and drains.
    """

    def make_all() -> None:
        for call in calls:
            call()

    if device.type != "cuda":
        return make_all
    make_all()  # what compiles or loads at the first call does so before the capture
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        make_all()
    return graph.replay


def time_steps(
    candidates: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int = 5,
    per_round: int = 3,
) -> dict[str, Timing]:
    """Measure host-clock time per call over blocks of ``per_round`` calls, synchronized at both
    ends.
    """
    for call in candidates.values():
        for _ in range(WARMUP):
            call()
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    with alone():
        for order in rotations(list(candidates), rounds):
            for name in order:
                candidates[name]()  # the first call after another peer pays for its cold caches
                synchronize(device)
                start = time.perf_counter()
                for _ in range(per_round):
                    candidates[name]()
                synchronize(device)
                samples[name].append((time.perf_counter() - start) / per_round)
    return {name: Timing.of(values) for name, values in samples.items()}


def first_call(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call that has to compile."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Return the most device memory allocated at one time during a call; None on CPU."""
    if device.type != "cuda":
        return None
    call()
    torch.cuda.synchronize(device)
    gc.collect()  # modules and compiler leave cycles behind that hold tensors
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def held_bytes(device: torch.device) -> int | None:
    """Return the device memory allocated between calls; None on CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def measure_ceilings(device: torch.device, *, quick: bool = False) -> Ceilings:
    """Measure the best copy bandwidth and bf16 matrix rate seen now, on random data."""
    if device.type == "cuda":
        copy_bytes, side, count = 2 << 30, 8192, 10
    else:
        copy_bytes, side, count = (64 << 20, 512, 3) if quick else (256 << 20, 2048, 7)
    source = torch.randint(0, 255, (copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))

    def best(call: Callable[[], object]) -> float:
        for _ in range(3):
            start = time.perf_counter()
            call()
            taken = time.perf_counter() - start
            if device.type == "cpu" and taken > 2:  # one without products of 16 bits
                return taken
        times = []
        for _ in range(count):
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            times.append(time.perf_counter() - start)
        return min(times)

    with alone():
        return Ceilings(
            copy_gbps=2 * copy_bytes / best(lambda: target.copy_(source)) / 1e9,
            matmul_tflops=2 * side**3 / best(lambda: a @ b) / 1e12,
        )
