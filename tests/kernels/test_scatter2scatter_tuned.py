"""Tiles that are timed first: the fastest is kept; one that does not run is left out, and told."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inductor_q.kernels import scatter2scatter_triton, scatter2scatter_tuned, tiles
from inductor_q.kernels.calls import Scatter2Scatter
from tests.support.compile_triton import compiled
from tests.support.moe import layer
from tests.support.tile_cases import BF16, DEVICES, FIT, WORK, device, on_gpu

triton = pytest.importorskip("triton")


class Clock:
    """In place of a GPU. Every tile takes a second to time; some cannot be launched."""

    def __init__(self, best: tiles.Tile | None = None) -> None:
        self.now = 0.0
        self.timed: list[tiles.Tile] = []
        self.best = best
        self.fails: Callable[[tiles.Tile], bool] = lambda _: False
        self.error: Exception | None = None

    def bench(self, run: Callable[[], tiles.Tile], **_: Any) -> float:
        return self.milliseconds(run())

    def launch(self, _: Scatter2Scatter, tile: tiles.Tile) -> tiles.Tile:
        if self.fails(tile):
            self.now += 1.0
            assert self.error
            raise self.error
        return tile

    def milliseconds(self, tile: tiles.Tile) -> float:
        self.now += 1.0
        self.timed.append(tile)
        return 1.0 if tile == self.best else 2.0

    def find(self, arch: int = 120) -> tiles.Tile | None:
        return scatter2scatter_tuned.fastest(
            WORK, device(arch), self.milliseconds, lambda: self.now
        )


def test_tuning_takes_the_fastest_and_stops_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    default = tiles.start(WORK, device(120))
    fit = tiles.pruned(tiles.candidates(WORK), WORK, DEVICES[120])
    clock = Clock()
    assert clock.find() == default  # of equals, the nearest to the default
    assert clock.timed[0] == default
    assert len(clock.timed) == min(len(fit), int(scatter2scatter_tuned.SECONDS) + 1)
    near = clock.timed[3]
    assert Clock(near).find() == near
    monkeypatch.setattr(scatter2scatter_tuned, "SECONDS", -1.0)
    clock = Clock(near)
    assert clock.find() == default and clock.timed == [default]  # one, however short the time


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clock:
    """The tuner on an empty cache, with a clock in place of a GPU."""
    clock = Clock(tiles.Tile(64, 64, 64, 4, 3))
    kernel = scatter2scatter_tuned.KERNEL
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(scatter2scatter_tuned, "_KNOWN", {})
    monkeypatch.setattr(scatter2scatter_tuned, "work", lambda _: WORK)
    monkeypatch.setattr(tiles, "limits", lambda _: device(120))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a device")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(kernel, "launch", clock.launch)
    monkeypatch.setattr(triton.testing, "do_bench", clock.bench)
    return clock


def tile_taken() -> tiles.Tile:
    return scatter2scatter_tuned.KERNEL._tile(layer(FIT, dtype=BF16).call())


def test_what_was_tuned_is_kept_for_the_next_process(
    tuned: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert tile_taken() == tuned.best
    count = len(tuned.timed)
    assert count > 1 and len(list(tmp_path.rglob("qfuse/tiles/*.json"))) == 1
    assert tile_taken() == tuned.best
    scatter2scatter_tuned._KNOWN.clear()
    assert tile_taken() == tuned.best and len(tuned.timed) == count
    scatter2scatter_tuned._KNOWN.clear()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "another")
    assert tile_taken() == tuned.best and len(tuned.timed) == 2 * count


@pytest.mark.parametrize("kept", ["", "{}", '{"rows": 16, "height": 1}'])
def test_a_kept_tile_that_cannot_be_read_is_timed_again(
    kept: str, tuned: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert tile_taken() == tuned.best
    (path,) = tmp_path.rglob("qfuse/tiles/*.json")
    path.write_text(kept)
    scatter2scatter_tuned._KNOWN.clear()
    assert tile_taken() == tuned.best
    assert "a kept tile cannot be read, and is timed again" in caplog.text
    assert "rows" in path.read_text() and "height" not in path.read_text()


def test_nothing_is_timed_under_capture_or_where_a_tile_is_committed(
    tuned: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tile_taken() == tiles.start(WORK, device(120))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    committed = tiles.Tile(32, 32, 32, 4, 5)
    monkeypatch.setattr(tiles, "COMMITTED", {(12, 0): {WORK: committed}})
    assert tile_taken() == committed
    assert not tuned.timed


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
def test_a_tile_that_does_not_run_is_left_out_and_told(
    name: str, tuned: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "inductor_q")
    default = tiles.start(WORK, device(120))
    tuned.fails, tuned.error = lambda tile: tile == default, FAILURES[name]()
    assert tile_taken() == tuned.best
    assert tile_taken() == tuned.best
    told = f"{default} is left out of the tuning: {name}: {tuned.error}"
    assert caplog.text.count("left out of the tuning") == caplog.text.count(told) == 1


def test_tiles_that_do_not_run_take_none_of_the_time(
    tuned: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that runs is found, however late."""
    monkeypatch.setattr(scatter2scatter_tuned, "SECONDS", -1.0)
    tuned.fails, tuned.error = lambda tile: tile != tuned.best, FAILURES["OutOfMemoryError"]()
    assert tile_taken() == tuned.best == tuned.timed[0]
    assert len(tuned.timed) == 1


def test_the_default_is_taken_with_a_warning_where_no_tile_runs(
    tuned: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tuned.fails, tuned.error = lambda _: True, FAILURES["OutOfMemoryError"]()
    default = tiles.start(WORK, device(120))
    assert tile_taken() == default
    (record,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert f"no tile runs here, left at {default} for {WORK}" in record.message
    assert not tuned.timed and not list(tmp_path.rglob("*.json"))
    tuned.fails = lambda _: False
    assert tile_taken() == default and not tuned.timed  # once a process
    scatter2scatter_tuned._KNOWN.clear()
    assert tile_taken() == tuned.best


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("expected all tensors to be on the same device"),
        AttributeError("no attribute 'order'"),
    ],
    ids=lambda error: str(error),
)
def test_what_is_no_fault_of_a_tile_is_raised(error: Exception, tuned: Clock) -> None:
    tuned.fails, tuned.error = lambda _: True, error
    with pytest.raises(type(error), match=re.escape(str(error))):
        tile_taken()


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_gpu_tuned_is_as_near_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(scatter2scatter_tuned, "_KNOWN", {})
    monkeypatch.setattr(scatter2scatter_tuned, "SECONDS", 3.0)
    case = on_gpu(FIT, grouped=(False, True))
    with torch.no_grad():
        exact = case.double().loop()
        peer = float((case.loop().double() - exact).norm())
        y = case(provider="triton_tuned")
        assert float((y.double() - exact).norm()) <= 1.25 * peer
        assert len(list(tmp_path.rglob("qfuse/tiles/*.json"))) == 1
        scatter2scatter_tuned._KNOWN.clear()
        monkeypatch.setattr(scatter2scatter_tuned, "fastest", None)  # not again
        assert torch.equal(case(provider="triton_tuned"), y)


@pytest.mark.gpu
def test_gpu_tiles_that_do_not_run_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 24 rows, which no compiler takes, and of more shared memory than any device has."""
    caplog.set_level("INFO", "inductor_q")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(scatter2scatter_tuned, "_KNOWN", {})
    case = on_gpu(FIT, grouped=(False, True))
    default = tiles.choose(scatter2scatter_triton.work(case.call()), tiles.limits(case.x.device))
    broken = [tiles.Tile(24, 64, 64, 4, 3), tiles.Tile(128, 256, 128, 8, 9)]
    monkeypatch.setattr(tiles, "pruned", lambda *_: [*broken, default])
    with torch.no_grad():
        assert torch.equal(case(provider="triton_tuned"), case(provider="triton"))
    for tile, reason in zip(broken, ("CompilationError", "OutOfResources"), strict=True):
        assert caplog.text.count(f"{tile} is left out of the tuning: {reason}") == 1
