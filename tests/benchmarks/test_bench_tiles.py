"""Tiles that are timed: one that does not run is left out and logged; other errors are raised."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import bench_tiles
from inductor_q.kernels import tiles
from inductor_q.kernels.scatter2scatter_triton import KERNEL, work
from tests.support.compile_triton import compiled
from tests.support.moe import layer
from tests.support.tile_cases import BF16, FIT, WORK, device, on_gpu

triton = pytest.importorskip("triton")

TILE = tiles.start(WORK, device(120))


def timed(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> float:
    """Time TILE with a launch that raises `error`, or that takes 2 ms."""

    def launch(*_: Any) -> None:
        if error:
            raise error

    def bench(run: Callable[[], None], **_: Any) -> float:
        run()
        return 2.0

    monkeypatch.setattr(KERNEL, "run", launch)
    monkeypatch.setattr(triton.testing, "do_bench", bench)
    return bench_tiles.milliseconds(layer(FIT, dtype=BF16).call(), TILE)


def compilation_error() -> Any:
    """The compiler's own, for a range that is no power of two."""
    from inductor_q.kernels.expert_rows_triton import tile_map

    pointers = dict.fromkeys(("offsets", "tiles"), "*i32")
    with pytest.raises(triton.CompilationError) as caught:
        compiled(tile_map, {"HEIGHT": 32, "STEP": 16, "EXPERTS": 24}, pointers)
    return caught.value


#: What a tile that is too much for the compiler or for the device raises.
FAILURES: dict[str, Callable[[], Any]] = {
    "CompilationError": compilation_error,
    "OutOfResources": lambda: triton.OutOfResources(300_000, 232_448, "shared memory"),
    "PTXASError": lambda: triton.runtime.errors.PTXASError("Internal Triton PTX codegen error"),
    "OutOfMemoryError": lambda: torch.OutOfMemoryError("CUDA out of memory"),
    "RuntimeError": lambda: RuntimeError("PassManager::run failed"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_tile_that_does_not_run_is_left_out_and_logged(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "inductor_q")
    assert timed(monkeypatch) == 2.0 and not caplog.text
    error = FAILURES[name]()
    assert timed(monkeypatch, error) == math.inf
    assert f"{TILE} is left out: {name}: {error}" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("expected all tensors to be on the same device"),
        AttributeError("no attribute 'order'"),
    ],
    ids=lambda error: str(error),
)
def test_what_is_no_fault_of_a_tile_is_raised(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(type(error), match=re.escape(str(error))):
        timed(monkeypatch, error)


def test_those_next_to_the_default_are_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "limits", lambda _: device(120))
    call = layer(FIT, dtype=BF16).call()
    default = tiles.start(work(call), device(120))
    near = list(bench_tiles.near(call, 24))
    assert near[0] == default and len(near) == 24
    apart = [tiles.distance(tile, default) for tile in near]
    assert apart == sorted(apart)


@pytest.mark.gpu
def test_gpu_tiles_that_do_not_run_are_left_out() -> None:
    """Of 24 rows, which no compiler takes, and of more shared memory than any device has."""
    call = on_gpu(FIT, grouped=(False, True)).call()
    for broken in (tiles.Tile(24, 64, 64, 4, 3), tiles.Tile(128, 256, 128, 8, 9)):
        assert bench_tiles.milliseconds(call, broken) == math.inf
    assert 0 < bench_tiles.milliseconds(call, next(bench_tiles.near(call, 1))) < math.inf
