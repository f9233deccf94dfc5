"""Measuring, shared by every benchmark: peers side by side, ceilings, memory, tables, files.

Rules that the functions here enforce:

- Peers are timed in the same process in interleaved rounds, in an order that rotates: what drifts
  (clocks, neighbours) hits all of them. A number is the median; the 20th and 80th percentile say
  how far to trust it, and the shortest sample is kept for machines that are shared.
- Kernels: device events around each call, the cache flushed before it, and the device kept busy
  until the host has queued everything, so launch gaps of Python code are not counted as GPU time.
- Steps: the host clock around whole blocks of steps, synchronized at both ends.
- Ceilings (a large copy, a large matrix product) are measured in the same run; a roof is the larger
  of bytes over the one and operations over the other.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from inductor_q import testing

SCHEMA = 1
ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
PEERS = ("eager", "inductor", "qfuse")
VERSIONS = ("torch", "triton", "bitsandbytes", "peft", "transformers", "numpy")

console = Console(width=None if sys.stdout.isatty() else 160)


# --- results --------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Seconds a call: the median of all samples, the 20th and 80th percentile, the shortest."""

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
        """Of one call, where a sample was ``calls`` of them."""
        seconds = {name: value / calls for name, value in asdict(self).items() if name != "samples"}
        return replace(self, **seconds)


@dataclass(frozen=True)
class Ceilings:
    """What this device reached on a large copy and a large matrix product, minutes ago at most."""

    copy_gbps: float
    matmul_tflops: float

    def roof(self, *, flops: float = 0.0, bytes: float = 0.0) -> float:
        """Seconds below which no version can go."""
        return max(flops / (self.matmul_tflops * 1e12), bytes / (self.copy_gbps * 1e9))


@dataclass
class Row:
    """One peer on one case. ``roof`` is in seconds; ``extra`` holds what only some benchmarks
    have.
    """

    case: dict[str, Any]
    peer: str
    timing: Timing
    roof: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Suite:
    """The rows of one benchmark run, and where they were measured."""

    name: str
    device: torch.device
    ceilings: Ceilings
    settings: dict[str, Any] = field(default_factory=dict)
    statistic: str = "median"  # what tables and ratios show: a field of Timing
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(
        self,
        case: Mapping[str, Any],
        timings: Mapping[str, Timing],
        *,
        roof: float | None = None,
        extra: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        for peer, timing in timings.items():
            values = dict((extra or {}).get(peer, {}))
            self.rows.append(Row(dict(case), peer, timing, roof, values))

    def cases(self) -> list[dict[str, Any]]:
        return list({json.dumps(row.case): row.case for row in self.rows}.values())

    def peers(self) -> list[str]:
        return list(dict.fromkeys(row.peer for row in self.rows))

    def find(self, case: Mapping[str, Any], peer: str) -> Row | None:
        return next((r for r in self.rows if r.case == case and r.peer == peer), None)

    def ratio(self, case: Mapping[str, Any], peer: str, to: str) -> float | None:
        """Time of ``peer`` over time of ``to``: below 1 is faster."""
        one, other = self.find(case, peer), self.find(case, to)
        if one is None or other is None:
            return None
        return self.seconds(one) / self.seconds(other)

    def seconds(self, row: Row) -> float:
        value: float = getattr(row.timing, self.statistic)
        return value

    def as_dict(self) -> dict[str, Any]:
        rows = []
        for row in self.rows:
            entry = asdict(row)
            entry["roof_fraction"] = row.roof / self.seconds(row) if row.roof else None
            entry["ratio_to"] = {
                peer: self.ratio(row.case, row.peer, peer)
                for peer in self.peers()
                if peer != row.peer and self.find(row.case, peer) is not None
            }
            rows.append(entry)
        return {
            "schema": SCHEMA,
            "benchmark": self.name,
            "device": self.device.type,
            "machine": machine(self.device),
            "versions": versions(),
            "commit": commit(),
            "load": load(),
            "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "ceilings": asdict(self.ceilings),
            "settings": {**self.settings, "statistic": self.statistic},
            "rows": rows,
            "notes": self.notes,
        }

    def save(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        return path

    def table(self, *, extras: Sequence[str] = ()) -> Table:
        """A row a case, a column a peer with its share of the roof, then the ratios of qfuse."""
        table = Table(title=f"{self.name} on {machine(self.device)['name']}", title_justify="left")
        cases, peers = self.cases(), self.peers()
        for key in cases[0] if cases else ():
            table.add_column(str(key))
        roofed = any(row.roof for row in self.rows)
        if roofed:
            table.add_column("roof", justify="right")
        for peer in peers:
            table.add_column(escape(peer), justify="right")
        against = [p for p in peers if p != "qfuse"] if "qfuse" in peers else []
        for peer in against:
            table.add_column(f"qfuse / {escape(peer)}", justify="right")
        for case in cases:
            cells = [str(value) for value in case.values()]
            found = {peer: self.find(case, peer) for peer in peers}
            if roofed:
                roof = next((row.roof for row in found.values() if row and row.roof), None)
                cells.append(duration(roof) if roof else "")
            cells += [self._cell(row, extras) if row else "" for row in found.values()]
            for peer in against:
                ratio = self.ratio(case, "qfuse", peer)
                cells.append("" if ratio is None else f"{ratio:.2f}")
            table.add_row(*cells)
        return table

    def _cell(self, row: Row, extras: Sequence[str]) -> str:
        text = duration(self.seconds(row))
        if row.roof:
            text += f" ({100 * row.roof / self.seconds(row):.0f}%)"
        for key in extras:
            if row.extra.get(key) is not None:
                text += f"\n{_labelled(key, row.extra[key])}"
        return text

    def plot(self, path: Path) -> Path | None:
        """Bars of time relative to the first peer; None where matplotlib is missing."""
        try:
            import matplotlib
        except ImportError:
            console.print("no plot: matplotlib is not installed")
            return None
        matplotlib.use("Agg")
        from matplotlib import pyplot

        cases, peers = self.cases(), self.peers()
        figure, axes = pyplot.subplots(figsize=(max(6.0, 1.2 * len(cases) + 2), 4))
        width = 0.8 / len(peers)
        for index, peer in enumerate(peers):
            ratios = [self.ratio(case, peer, peers[0]) or float("nan") for case in cases]
            places = [
                position + (index - (len(peers) - 1) / 2) * width for position in range(len(cases))
            ]
            axes.bar(places, ratios, width=width, label=peer)
        if any(row.roof for row in self.rows):
            for position, case in enumerate(cases):
                first = self.find(case, peers[0])
                if first is not None and first.roof:
                    roof = first.roof / self.seconds(first)
                    axes.hlines(
                        roof, position - 0.45, position + 0.45, color="black", linestyle=":"
                    )
        axes.axhline(1.0, color="grey", linewidth=0.8)
        labels = ["\n".join(f"{key} {value}" for key, value in case.items()) for case in cases]
        axes.set_xticks(range(len(cases)), labels, fontsize=7)
        axes.set_ylabel(f"time relative to {peers[0]} (dotted: roof)")
        axes.set_title(f"{self.name}, {machine(self.device)['name']}", fontsize=10)
        axes.legend(fontsize=8)
        figure.tight_layout()
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        return path


def _labelled(key: str, value: Any) -> str:
    if key.endswith("_bytes"):
        return f"{key.removesuffix('_bytes')} {size(value)}"
    if key.endswith("_s"):
        return f"{key.removesuffix('_s')} {duration(value)}"
    return f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"


def duration(seconds: float) -> str:
    """Three or four digits and a unit: 37.1 us, 71.8 ms, 12.3 s."""
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds * scale < 1000:
            return f"{seconds * scale:.4g} {unit}"
    return f"{seconds:.3g} s"


def size(count: float) -> str:
    """Bytes with a unit, powers of ten."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


# --- where it ran ---------------------------------------------------------------------


def machine(device: torch.device) -> dict[str, Any]:
    """The device's name and what bounds it."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return {
        "name": _cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str | None]:
    """Versions of what a number depends on; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in VERSIONS:
        found[name] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    found["torch"] = torch.__version__  # with the +cu130 that metadata may lack
    return found


def load() -> float | None:
    """Runnable processes, averaged over the last minute: well above the thread count of the
    benchmark, CPU numbers are a neighbour's as well.
    """
    with contextlib.suppress(OSError):
        return os.getloadavg()[0]
    return None


def commit() -> dict[str, Any]:
    """The commit that was measured, and whether the tree had changes on top."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    status = git("status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results")
    # A copy of the tree without its history (a GPU machine) is told which commit it is.
    found = git("rev-parse", "HEAD") or os.environ.get("BENCHMARK_COMMIT")
    return {"id": found, "dirty": None if status is None else bool(status)}


def device_slug(device: torch.device) -> str:
    """``cpu``, ``h200``, ``rtx-4090``: the part of a result's file name."""
    if device.type != "cuda":
        return device.type
    name = re.sub(r"nvidia|geforce", "", torch.cuda.get_device_name(device).lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


# --- timing ---------------------------------------------------------------------------


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
    warmup: int = 3,
    max_samples: int = 200,
) -> dict[str, Timing]:
    """Device time a call, cache flushed before each; about ``budget`` seconds a peer and round."""
    flush = torch.empty(
        (256 if device.type == "cuda" else 64) << 20, dtype=torch.uint8, device=device
    )
    sample = _cuda_sample if device.type == "cuda" else _cpu_sample
    counts: dict[str, int] = {}
    host: dict[str, float] = {}
    for name, call in candidates.items():
        for _ in range(warmup):
            call()
        synchronize(device)
        start = time.perf_counter()
        flush.zero_()
        call()
        synchronize(device)
        once = time.perf_counter() - start
        start = time.perf_counter()
        call()
        host[name] = time.perf_counter() - start  # on a GPU: how long the host takes to queue it
        counts[name] = min(max_samples, max(3, int(budget / max(once, 1e-6))))
        synchronize(device)
    samples: dict[str, list[float]] = {name: [] for name in candidates}
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
    """One call that makes all of ``calls``, in order: on a GPU a graph, whose launches no host
    delays. On buffers that together exceed the cache it shows what a kernel sustains, free of the
    few microseconds in which a single launch starts and drains.
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
    warmup: int = 2,
) -> dict[str, Timing]:
    """Host-clock time a call over blocks of ``per_round`` calls, synchronized at both ends."""
    for call in candidates.values():
        for _ in range(warmup):
            call()
    samples: dict[str, list[float]] = {name: [] for name in candidates}
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
    """Seconds of a call that has to compile."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Most device memory allocated at one time during a call; None on CPU, which does not count."""
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
    """Device memory allocated between calls; None on CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def measure_ceilings(device: torch.device, *, quick: bool = False) -> Ceilings:
    """The best copy bandwidth and bf16 matrix rate seen now, on random data."""
    if device.type == "cuda":
        copy_bytes, side, count = 2 << 30, 8192, 10
    else:
        copy_bytes, side, count = (64 << 20, 512, 3) if quick else (256 << 20, 2048, 7)
    source = torch.randint(0, 255, (copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))

    def best(call: Callable[[], object]) -> float:
        for _ in range(3):
            call()
        times = []
        for _ in range(count):
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            times.append(time.perf_counter() - start)
        return min(times)

    return Ceilings(
        copy_gbps=2 * copy_bytes / best(lambda: target.copy_(source)) / 1e9,
        matmul_tflops=2 * side**3 / best(lambda: a @ b) / 1e12,
    )


# --- peers ----------------------------------------------------------------------------


def compile_as(peer: str, fn: Callable[..., Any], *, dynamic: bool | None = False) -> Any:
    """``fn`` as ``peer`` runs it.

    ``eager``; ``inductor`` and ``max-autotune`` (stock); ``qfuse``; and for ablations
    ``qfuse[key=value;key=value]`` or ``inductor[...]``, where the pairs are the backend's options.
    """
    if peer == "eager":
        return fn
    if peer == "inductor" or peer.startswith("inductor["):
        options = _peer_options(peer)
        return torch.compile(fn, backend="inductor", options=options, dynamic=dynamic)
    if peer == "max-autotune":
        return torch.compile(fn, mode="max-autotune-no-cudagraphs", dynamic=dynamic)
    if peer == "qfuse" or peer.startswith("qfuse["):
        options = _peer_options(peer)
        return torch.compile(fn, backend=testing.qfuse_backend(), options=options, dynamic=dynamic)
    known = "eager, inductor, inductor[...], max-autotune, qfuse, qfuse[...]"
    raise ValueError(f"no peer {peer!r}; known: {known}")


def _peer_options(peer: str) -> dict[str, Any] | None:
    pairs = peer.partition("[")[2].removesuffix("]")
    if not pairs:
        return None
    options: dict[str, Any] = {}
    for pair in pairs.split(";"):
        key, _, value = pair.partition("=")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value  # a bare word
    return options


def available(peers: Sequence[str]) -> list[str]:
    """The peers that can run here; says which cannot."""
    usable = []
    for peer in peers:
        if peer.startswith("qfuse"):
            try:
                testing.qfuse_backend()
            except ImportError as error:
                console.print(f"[yellow]without {peer}: {error}")
                continue
        usable.append(peer)
    return usable


# --- command line ---------------------------------------------------------------------


def parser(doc: str | None, *, peers: Sequence[str] = PEERS) -> argparse.ArgumentParser:
    """The options every benchmark takes."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cpu or cuda (default: what is there)")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases; not saved")
    parser.add_argument("--backends", nargs="+", default=list(peers), metavar="PEER")
    parser.add_argument("--rounds", type=int, default=None, help="interleaved rounds")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument(
        "--statistic",
        choices=("median", "best"),
        default="median",
        help="what to show and compare; best is for a machine shared with others",
    )
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/)")
    parser.add_argument("--plot", type=Path, nargs="?", const=Path("auto"), help="write a PNG")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def start(name: str, arguments: argparse.Namespace) -> Suite:
    """Check the device, seed, silence the libraries, measure the ceilings."""
    device = torch.device(arguments.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            sys.exit("--device cuda: torch sees no CUDA device")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    ceilings = measure_ceilings(device, quick=arguments.quick)
    console.print(
        f"{machine(device)['name']}, torch {torch.__version__}: copy {ceilings.copy_gbps:.0f} GB/s,"
        f" bf16 matmul {ceilings.matmul_tflops:.3g} TFLOP/s"
    )
    busy = load()
    if device.type == "cpu" and busy is not None and busy > 0.5 * torch.get_num_threads():
        console.print(f"[yellow]other processes are running (load {busy:.1f}): expect noise")
    settings = {
        "quick": arguments.quick,
        "backends": arguments.backends,
        "seed": arguments.seed,
    }
    return Suite(name, device, ceilings, settings, arguments.statistic)


def finish(suite: Suite, arguments: argparse.Namespace, *, extras: Sequence[str] = ()) -> None:
    """Print the table, save the JSON and, where asked for, the plot."""
    console.print(suite.table(extras=extras))
    for note in suite.notes:
        console.print(note, highlight=False)
    name = f"{suite.name.removeprefix('bench_')}-{device_slug(suite.device)}"
    path = arguments.out
    if path is None and not arguments.quick:
        path = RESULTS / f"{name}.json"
    if path is not None:
        console.print(f"wrote {suite.save(path)}")
    if arguments.plot is not None:
        automatic = path.with_suffix(".png") if path is not None else RESULTS / f"{name}.png"
        plotted = suite.plot(automatic if arguments.plot == Path("auto") else arguments.plot)
        if plotted is not None:
            console.print(f"wrote {plotted}")
