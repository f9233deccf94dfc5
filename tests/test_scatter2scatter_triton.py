"""The Triton kernels of scatter2scatter: interpreted and compiled here, and run on a GPU."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from inductor_q import kernels
from inductor_q.formats import FORMATS
from inductor_q.kernels import (
    scatter2scatter_cuda,
    scatter2scatter_triton,
    scatter2scatter_tuned,
    tiles,
)
from inductor_q.kernels.scatter2scatter_triton import KERNEL
from inductor_q.ops.scatter2scatter import DENSE, Scatter2Scatter
from tests.compile_triton import compiled
from tests.gpu_experts import (
    assert_as_near_as_the_loop,
    assert_never_synchronizes_and_is_captured,
    assert_zero_where_nobody_is,
)
from tests.moe import Layer, Sizes, layer, results

triton = pytest.importorskip("triton")

BF16, FP16 = torch.bfloat16, torch.float16
GROUPED = list(itertools.product([False, True], repeat=2))
FIT = Sizes(experts=8, in_features=256, out_features=384, tokens=300, top_k=2, rank=16)
SHAPES = {
    "few rows": replace(FIT, tokens=5),
    "some rows": FIT,
    "many rows": replace(FIT, experts=3, tokens=900),
    "features no multiple of a tile": replace(FIT, in_features=320, out_features=200),
    "one expert, one token": Sizes(1, 128, 64, 1, 1, 8),
    "every expert": Sizes(4, 64, 128, 40, 4, 64),
    "odd rank": replace(FIT, rank=5),
    "wide rank": replace(FIT, rank=100),
    "most experts empty": replace(FIT, experts=200, tokens=9),
}
#: Capability: shared memory that a block can have.
DEVICES = {75: 65_536, 80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


def device(arch: int) -> tiles.Limits:
    return tiles.Limits((arch // 10, arch % 10), DEVICES[arch])


# --- without a GPU --------------------------------------------------------------------------------


def test_in_the_interpreter() -> None:
    """Real kernels, CPU tensors; a process of its own, since Triton reads the variable once."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.interpret_scatter2scatter"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "interpreter cannot loop" in run.stderr:
        pytest.skip(run.stderr.splitlines()[-1])
    assert run.returncode == 0, run.stderr[-3000:]
    assert int(run.stdout) > 30


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", ["nf4_b64", "fp4_b64"])
def test_printed_look_up_has_the_value_of_every_code(name: str, dtype: torch.dtype) -> None:
    """All 256 bytes, through the PTX that a GPU is given."""
    import numpy as np

    from tests import ptx

    values, _ = scatter2scatter_triton.fit(FORMATS[name].codec.values, dtype)  # type: ignore[attr-defined]
    match = re.search(r'"""(.*?)"""', scatter2scatter_triton._printed_look_up(values), re.DOTALL)
    assert match
    registers = ptx.run(match[1], [np.arange(256, dtype=np.uint8).view(np.uint32)], 4)
    even, odd = (
        torch.from_numpy(np.stack(registers[i : i + 2], -1).view(np.int16).reshape(-1))
        for i in (0, 2)
    )
    byte = torch.arange(256)
    assert torch.equal(even, values.view(torch.int16)[byte >> 4])
    assert torch.equal(odd, values.view(torch.int16)[byte & 15])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("group", [64, 0], ids=["packed", "dense"])
@pytest.mark.parametrize(("arch", "even"), [(75, True), (80, True), (90, False), (120, True)])
def test_compiles_and_takes_no_more_than_was_computed(
    arch: int, even: bool, group: int, transposed: bool
) -> None:
    from inductor_q.kernels.expert_gemm_triton import expert_gemm

    work = WORK if group else replace(WORK, weight_bits=16, group=0)
    work = replace(work, transposed=transposed)
    tile = tiles.start(work, device(arch))
    dtype, name = (FP16, "*fp16") if arch == 75 else (BF16, "*bf16")
    kernel = scatter2scatter_triton._kernel(FORMATS["nf4_b64"], dtype)
    constants = {
        "PARTS": 2,
        "ROWS": tile.rows,
        "FEATURES": tile.features,
        "DEPTH": tile.depth,
        "RANK": work.rank,
        "GROUP": work.group,
        "LOOK_UP": kernel.look_up if group else None,
        "TRANSPOSED": transposed,
        "TOP_K": 8 if transposed else 0,
        "BIAS": not transposed,
        "EVEN": even,
    }
    pointers = dict.fromkeys(("out", "x", "projected", "factor", "bias"), name) | {
        "tiles": "*i32",
        "order": "*i64",
        "weight": "*u8" if group else name,
        "scales": "*fp32",
    }
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    result = compiled(expert_gemm, constants, pointers, arch=arch, **options)
    assert result.metadata.shared <= tiles.shared_bytes(tile, work) + tiles.SLACK_BYTES
    if arch > 75:  # the loop copies ahead, and multiplies matrices
        assert re.search(r"cp\.async", result.asm["ptx"])
        assert re.search(r"mma\.sync|wgmma", result.asm["ptx"])


@pytest.mark.parametrize("name", ["nf4_b64", "nf4_b64_nested"])
def test_what_surrounds_the_product_compiles(name: str) -> None:
    from inductor_q.kernels import expert_rows_triton

    kernel = scatter2scatter_triton._kernel(FORMATS[name], BF16)
    pointers = {"out": "*fp32", "offsets": "*i32", "absmax": "*u8", "factor": "fp32"}
    pointers |= dict.fromkeys(("nested_codebook", "nested_absmax", "nested_offset"), "*fp32")
    compiled(kernel.expand_scales, {"GROUP": 64, "ROWS": 64, "GROUPS": 32}, pointers, arch=80)
    pointers = dict.fromkeys(("offsets", "tiles"), "*i32")
    for experts in (1, 128):
        sizes = {"HEIGHT": 128, "STEP": 16, "EXPERTS": experts}
        compiled(expert_rows_triton.tile_map, sizes, pointers, arch=80)
    project: dict[str, Any] = {"PARTS": 1, "ROWS": 64, "RANK": 128, "DEPTH": 64, "TOP_K": 8}
    pointers |= {**dict.fromkeys(("x", "out", "scaled"), "*bf16"), "a": "*fp32", "order": "*i64"}
    result = compiled(expert_rows_triton.project, project, pointers | {"scaling": "fp32"}, arch=89)
    assert result.metadata.shared <= DEVICES[89]


# --- tiles ----------------------------------------------------------------------------------------

WORK = tiles.Work(
    rows=64,
    in_features=2048,
    out_features=1536,
    transposed=False,
    weight_bits=4,
    group=64,
    rank=16,
)


@pytest.mark.parametrize("rows", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("arch", DEVICES)
def test_tiles_fit_the_device_and_the_problem(arch: int, rows: int) -> None:
    for bits, group, transposed in ((4, 64, False), (4, 32, True), (32, 0, False)):
        work = replace(WORK, rows=rows, weight_bits=bits, group=group, transposed=transposed)
        fit = tiles.pruned(tiles.candidates(work), work, DEVICES[arch])
        assert fit
        for tile in fit:
            assert tiles.shared_bytes(tile, work) <= DEVICES[arch] - 10_000
            assert tiles.register_bytes(tile, work) <= 1024
            assert tile.rows < 2 * max(16, rows)
        assert tiles.start(work, device(arch)) in fit


def test_candidates_are_the_published_ones() -> None:
    """And 16 rows, for experts that have fewer than 32."""
    found = [t for rows in (16, 32, 128) for t in tiles.candidates(replace(WORK, rows=rows))]
    assert {t.rows for t in found} == {16, 32, 64, 128}
    assert {t.features for t in found} == {32, 64, 128, 256}
    assert {t.depth for t in found} == {32, 64, 128}
    assert {t.warps for t in found} == {4, 8} and {t.stages for t in found} == {3, 4, 5}
    small = replace(WORK, in_features=64, out_features=48)
    assert {(t.features, t.depth) for t in tiles.candidates(small)} == {
        (features, depth) for features in (32, 64) for depth in (32, 64)
    }


def test_bytes_are_those_of_the_operands() -> None:
    tile = tiles.Tile(rows=64, features=128, depth=64, warps=4, stages=3)
    x, decoded = 64 * 64 * 2, 128 * 64 * 2
    assert tiles.shared_bytes(tile, WORK) == 3 * (x + 128 * 32 + 128 * 4) + decoded
    transposed = replace(WORK, transposed=True)  # 64 rows with two groups each
    assert tiles.shared_bytes(tile, transposed) == 3 * (x + 128 * 32 + 64 * 2 * 4) + decoded
    dense = replace(WORK, weight_bits=16, group=0)
    assert tiles.shared_bytes(tile, dense) == 3 * (x + decoded) + decoded
    assert tiles.shared_bytes(tile, replace(WORK, rank=1024)) == 2 * 1024 * (64 + 128)


def test_the_smallest_is_left_where_none_fits() -> None:
    every = tiles.candidates(WORK)
    smallest = min(every, key=lambda tile: tiles.shared_bytes(tile, WORK))
    for capacity in (0, 10_000, tiles.shared_bytes(smallest, WORK) + 9_999):
        assert tiles.pruned(every, WORK, capacity) == [smallest]
    assert len(tiles.pruned(every, WORK, tiles.shared_bytes(smallest, WORK) + 10_000)) >= 1
    heavy = [t for t in every if tiles.register_bytes(t, WORK) > tiles.REGISTER_BYTES]
    assert heavy and len(tiles.pruned(heavy, WORK, DEVICES[90])) == 1


def test_committed_tiles_fit_their_device() -> None:
    for (major, minor), table in tiles.COMMITTED.items():
        limits = device(10 * major + minor)
        for work, tile in table.items():
            assert tile in tiles.pruned(tiles.candidates(work), work, limits.shared_bytes)
            assert tiles.choose(work, limits) == tile


def test_a_committed_tile_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = tiles.Tile(128, 256, 128, 8, 5)
    monkeypatch.setattr(tiles, "COMMITTED", {(12, 0): {WORK: tile}})
    assert tiles.choose(WORK, device(120)) == tile
    assert tiles.choose(WORK, device(89)) == tiles.start(WORK, device(89)) != tile
    assert tiles.choose(replace(WORK, rank=32), device(120)) != tile


# --- tuning ---------------------------------------------------------------------------------------


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


# --- refusals -------------------------------------------------------------------------------------


def test_refuses_what_it_does_not_fit_with_a_reason() -> None:
    case = layer(FIT, dtype=BF16)
    assert "cpu tensors" in KERNEL.supports(case.call())
    assert "float32" in KERNEL.supports(layer(FIT).call())
    assert "nibbles" in KERNEL.supports(case.call(fmt=FORMATS["kbit4_e4m4"]))
    assert "rows of 48" in KERNEL.supports(layer(replace(FIT, in_features=48), dtype=BF16).call())
    assert "rank 129" in KERNEL.supports(layer(replace(FIT, rank=129), dtype=BF16).call())
    operands = [case.operands[0].expand(2, -1, -1)[:, ::2], *case.operands[1:]]
    assert "qweight is not contiguous" in KERNEL.supports(case.call(operands=operands))


# --- dispatch -------------------------------------------------------------------------------------


def served(
    case: Layer, arch: int, monkeypatch: pytest.MonkeyPatch, provider: str = "auto"
) -> tuple[str, list[str]]:
    """Which kernel a GPU of that architecture would launch for `case`, and what is told."""
    op: Any = importlib.import_module("inductor_q.ops.scatter2scatter")
    capability = device(arch).capability
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr("inductor_q.csrc.nvrtc.library", lambda: None)  # as if it were there
    monkeypatch.setattr(scatter2scatter_cuda, "_function", lambda *_: None)
    launched: list[str] = []
    told: list[str] = []
    monkeypatch.setattr(op, "_tell_once", lambda *args: told.append(": ".join(args)))
    for kernel in kernels.SCATTER2SCATTER["cuda"]:
        name = kernel.name
        monkeypatch.setattr(kernel, "launch", lambda _, name=name: launched.append(name))
    with FakeTensorMode():

        def fake(value: Any) -> Any:
            if isinstance(value, Tensor):
                return torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device="cuda"
                )
            return value

        arguments = [
            case.x,
            case.operands,
            case.format,
            case.shape,
            case.transposed,
            *case.routing,
            *(case.grouped_in, case.grouped_out, case.lora_a, case.lora_b, case.scaling),
            *(case.bias, case.gates, provider),
        ]
        op._scatter2scatter(
            *([fake(v) for v in a] if isinstance(a, list) else fake(a) for a in arguments)
        )
    return launched[0], told


@pytest.mark.parametrize("sentinel", [None, -1])
@pytest.mark.parametrize("arch", [80, 89, 100, 120])
def test_without_hopper_experts_are_decoded_in_the_loop_and_it_is_told(
    arch: int, sentinel: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with the sentinels of expert parallelism, which other libraries refuse there."""
    name, told = served(layer(FIT, dtype=BF16, sentinel=sentinel), arch, monkeypatch)
    assert name == "triton"
    assert told == ["cuda: csrc/scatter2scatter.cu is for compute capability 9.0 (Hopper)"]


def test_the_order_goes_by_rows_where_torch_has_a_grouped_gemm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few, many = replace(FIT, tokens=64), replace(FIT, experts=2, tokens=1024)
    packed: dict[str, Any] = {"dtype": BF16, "blocksize": 128}  # not what the Hopper kernel has
    for arch in (90, 100):
        assert served(layer(few, **packed), arch, monkeypatch)[0] == "triton"
        assert served(layer(many, **packed), arch, monkeypatch)[0] == "dequantize"
        assert served(layer(many, **packed), arch, monkeypatch, "triton")[0] == "triton"
        assert served(layer(few, dtype=BF16, quant=DENSE), arch, monkeypatch)[0] == "grouped_mm"
    for arch in (89, 120):  # torch's would wait for the device
        assert served(layer(many, **packed), arch, monkeypatch)[0] == "triton"
        assert served(layer(few, dtype=BF16, quant=DENSE), arch, monkeypatch)[0] == "triton"
    assert served(layer(few, dtype=BF16), 90, monkeypatch)[0] == "cuda"
    assert served(layer(few, dtype=FP16), 90, monkeypatch)[0] == "triton"


def test_what_it_refuses_is_served_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = layer(replace(FIT, rank=136), dtype=BF16)
    name, told = served(wide, 120, monkeypatch)
    assert name == "dequantize" and told[1] == "triton: rank 136 is over 128"
    name, told = served(layer(FIT, dtype=BF16), 75, monkeypatch)
    assert name == "reference" and "7.5 does not multiply torch.bfloat16" in told[1]
    assert served(layer(FIT, dtype=FP16), 75, monkeypatch)[0] == "triton"
    assert served(layer(FIT), 120, monkeypatch)[0] == "reference"


def test_a_cpu_has_no_triton_and_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    op: Any = importlib.import_module("inductor_q.ops.scatter2scatter")
    told: list[str] = []
    monkeypatch.setattr(op, "_tell_once", lambda *args: told.append(": ".join(args)))
    case = layer(replace(FIT, tokens=3))
    assert torch.equal(case(provider="triton"), case())
    assert told == ["triton: there is none of that name for cpu tensors"]


# --- on a GPU -------------------------------------------------------------------------------------


def on_gpu(sizes: Sizes, **kwargs: Any) -> Layer:
    return layer(sizes, device="cuda", **{"dtype": BF16, **kwargs})


def check(sizes: Sizes, **kwargs: Any) -> None:
    cases = [on_gpu(sizes, seed=seed, **kwargs) for seed in range(4)]
    assert all(not KERNEL.supports(case.call()) for case in cases)
    assert_as_near_as_the_loop(cases, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_gpu_kernel_is_as_near_as_the_loop(sizes: Sizes, dtype: torch.dtype) -> None:
    check(sizes, dtype=dtype, grouped=(False, True))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 900], ids=["few rows", "many rows"])
@pytest.mark.parametrize("quant, nested, blocksize", [
    (quant, nested, blocksize)
    for quant, nested in (("nf4", False), ("nf4", True), ("fp4", False), ("fp4", True))
    for blocksize in (32, 64, 128, 4096)
] + [(DENSE, False, 64)])  # fmt: skip
def test_gpu_every_format(quant: str, nested: bool, blocksize: int, rows: int) -> None:
    sizes = replace(FIT, tokens=rows)
    form: dict[str, Any] = {"quant": quant, "nested": nested, "blocksize": blocksize}
    check(sizes, lora=blocksize != 128, adapter=torch.float32, **form)


@pytest.mark.gpu
@pytest.mark.parametrize("grouped", GROUPED)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("quant", ["nf4", DENSE])
def test_gpu_every_form(
    quant: str, gates: bool, transposed: bool, grouped: tuple[bool, bool]
) -> None:
    sizes = replace(FIT, out_features=320)
    form: dict[str, Any] = {"transposed": transposed, "grouped": grouped, "gates": gates}
    check(sizes, quant=quant, bias=True, sentinel=-1, **form)
    case = on_gpu(sizes, quant=quant, bias=True, sentinel=-1, **form)
    first, second = (results(case, case(provider="triton")) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_gpu_codes_stored_as_floats(storage: torch.dtype) -> None:
    case = on_gpu(FIT, grouped=(False, True))
    wide = replace(case, operands=[case.operands[0].flatten().view(storage), *case.operands[1:]])
    assert torch.equal(case(provider="triton"), wide(provider="triton"))


@pytest.mark.gpu
def test_gpu_every_candidate_gives_the_result() -> None:
    """Whatever the tuner takes: all tiles that fit, forward and transposed."""
    for transposed, tokens in itertools.product([False, True], [9, 300]):
        case = on_gpu(replace(FIT, tokens=tokens), grouped=(False, True), transposed=transposed)
        call = case.call()
        work, limits = scatter2scatter_triton.work(call), tiles.limits(case.x.device)
        fit = tiles.pruned(tiles.candidates(work), work, limits.shared_bytes)
        with torch.no_grad():
            exact = case.double().loop()
            peer = float((case.loop().double() - exact).norm())
            for tile in fit[::5]:
                y, _ = KERNEL.launch(call, tile)
                assert float((y.double() - exact).norm()) <= 1.25 * peer, tile


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


@pytest.mark.gpu
def test_gpu_nobodys_rows_and_empty_experts_are_exactly_zero() -> None:
    case = on_gpu(replace(FIT, experts=64, tokens=9), grouped=(False, True), sentinel=-1)
    assert_zero_where_nobody_is(case, "triton")


@pytest.mark.gpu
def test_gpu_never_synchronizes_and_runs_in_a_captured_graph() -> None:
    assert_never_synchronizes_and_is_captured(on_gpu(FIT, grouped=(False, True)), "triton")
