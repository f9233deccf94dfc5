"""scatter2scatter with Triton, with the tile that was the fastest here: asked only by name.

The first call of a class of problems times tiles for SECONDS at most, those nearest to the default
first. What won is kept on disk, named by what it depends on, for the next process. A call that is
being captured in a CUDA graph, where nothing can be timed, takes the default if nothing is kept;
shapes with a committed tile are not timed. A tile that cannot be compiled or launched here is told
and left out; where there is no other, the default is taken, and what it raises is the caller's. A
tile decides in which order products are added, so results of two tiles differ by roundings.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from inductor_q.files import write_whole
from inductor_q.kernels import tiles
from inductor_q.kernels.calls import Scatter2Scatter
from inductor_q.kernels.gpu import on
from inductor_q.kernels.scatter2scatter_triton import Triton, work

log = logging.getLogger("inductor_q")

SECONDS = 30.0

#: How a bare RuntimeError of Triton begins where a tile is at fault: passes of the compiler that
#: fail, and CUDA's words for a launch that needs more registers or stack than there are.
_AT_FAULT = (
    "PassManager::run failed",
    "failed to translate module to LLVM IR",
    "Triton Error [CUDA]: too many resources requested for launch",
    "Triton Error [CUDA]: out of memory",
)

_KNOWN: dict[str, tiles.Tile] = {}  # what this process has timed or read, by key


class Tuned(Triton):
    name = "triton_tuned"

    def launch(
        self, call: Scatter2Scatter, tile: tiles.Tile | None = None
    ) -> tuple[Tensor, Tensor]:
        with on(call.x.device):
            return super().launch(call, tile or self._tile(call))

    def _tile(self, call: Scatter2Scatter) -> tiles.Tile:
        problem, limits = work(call), tiles.limits(call.x.device)
        if committed := tiles.committed(problem, limits):
            return committed
        key = _key(problem, limits, torch.cuda.get_device_name(call.x.device))
        tile = _KNOWN.get(key) or _read(key)
        if tile is None and torch.cuda.is_current_stream_capturing():
            return tiles.start(problem, limits)
        if tile is None:
            tile = fastest(problem, limits, lambda one: milliseconds(call, one))
            if tile is not None:
                _write(key, tile)
            else:  # not kept on disk: memory may be free in the next process
                tile = tiles.start(problem, limits)
                log.warning("scatter2scatter: no tile runs here, left at %s for %s", tile, problem)
        _KNOWN[key] = tile
        return tile


def milliseconds(call: Scatter2Scatter, tile: tiles.Tile, *, runs: int = 25) -> float:
    """Of a whole call; infinite for a tile that cannot be compiled or launched here.

    Args:
        runs: how many milliseconds it is repeated for; with 0 it is compiled and launched once.
    """
    import triton
    from triton.runtime.errors import PTXASError

    launch = functools.partial(KERNEL.launch, call, tile)
    try:
        if not runs:
            launch()
            return 0.0
        median: float = triton.testing.do_bench(launch, warmup=5, rep=runs, return_mode="median")
    except (triton.CompilationError, triton.OutOfResources, PTXASError, RuntimeError) as error:
        bare = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
        if bare and not str(error).startswith(_AT_FAULT):
            raise
        reason = f"{type(error).__name__}: {error}"
        log.info("scatter2scatter: %s is left out of the tuning: %s", tile, reason)
        return math.inf
    return median


def fastest(
    problem: tiles.Work,
    limits: tiles.Limits,
    milliseconds: Callable[[tiles.Tile], float],
    clock: Callable[[], float] = time.monotonic,
) -> tiles.Tile | None:
    """The best of the tiles that ran before SECONDS had passed, those next to the default first.

    At least one that runs, however long that takes; None where none does. `milliseconds` is
    infinite for a tile that does not run.
    """
    default = tiles.start(problem, limits)
    fit = tiles.pruned(tiles.candidates(problem), problem, limits.shared_bytes)
    until = clock() + SECONDS
    timed: dict[tiles.Tile, float] = {}
    for tile in sorted(fit, key=lambda one: tiles.distance(one, default)):
        if timed and clock() > until:
            break
        median = milliseconds(tile)
        if median < math.inf:
            timed[tile] = median
    if not timed:
        return None
    best = min(timed, key=timed.__getitem__)
    log.info(
        "scatter2scatter: %s takes %.3f ms, the default %.3f (%d of %d tiles timed) for %s",
        *(best, timed[best], timed.get(default, math.inf), len(timed), len(fit), problem),
    )
    return best


# --- what is kept on disk -------------------------------------------------------------------------


def _key(problem: tiles.Work, limits: tiles.Limits, device: str) -> str:
    """All that the best tile depends on: the problem, the device, the kernel and its compiler."""
    import triton

    from inductor_q.kernels.expert_gemm_triton import expert_gemm

    text = f"{problem} {limits} {device} {triton.__version__} {expert_gemm.cache_key}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _path(key: str) -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "qfuse" / "tiles" / f"{key}.json"


def _read(key: str) -> tiles.Tile | None:
    """What `_write` wrote; None where there is nothing, or something else."""
    try:
        return tiles.Tile(**json.loads(_path(key).read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        log.warning("scatter2scatter: a kept tile cannot be read, and is timed again: %s", error)
        return None


def _write(key: str, tile: tiles.Tile) -> None:
    try:
        write_whole(_path(key), json.dumps(dataclasses.asdict(tile)))
    except OSError as error:
        log.warning("scatter2scatter: a tuned tile is not kept for the next process: %s", error)


KERNEL = Tuned()
