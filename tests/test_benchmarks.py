"""The harness measures what it says, and every benchmark runs on the smallest sizes."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

for extra in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(extra)

import inductor_q  # noqa: E402
from benchmarks import (  # noqa: E402
    bench_adapter,
    bench_attention,
    bench_compute_outliers,
    bench_compute_quality,
    bench_decode,
    bench_dequantize,
    bench_experts,
    bench_formats,
    bench_kbit,
    bench_kbit_quality,
    bench_launch,
    bench_linear,
    bench_loss,
    bench_memory,
    bench_moe,
    bench_moe_model,
    bench_parts,
    bench_ranks,
    bench_recipe,
    bench_rows,
    bench_step,
    bench_thresholds,
    bench_tiles,
    bench_trainers,
    bench_walks,
    harness,
    origin,
    plots,
)
from benchmarks.__main__ import BRIEF  # noqa: E402
from benchmarks.__main__ import run as run_benchmarks  # noqa: E402
from benchmarks.peers import peer_options  # noqa: E402
from benchmarks.place import RESULTS  # noqa: E402
from benchmarks.recipes import RECIPES, Recipe  # noqa: E402
from docs import figures, read_results  # noqa: E402
from inductor_q import testing  # noqa: E402
from inductor_q.experts.model import stacks  # noqa: E402
from inductor_q.kernels import scatter2scatter_triton  # noqa: E402
from inductor_q.kernels.dispatch import serve  # noqa: E402
from tests.support.compiling import no_codegen  # noqa: E402
from tests.support.processes import environment  # noqa: E402
from tests.support.thresholds import ANY_EXPERT  # noqa: E402

CPU = torch.device("cpu")
COMMIT = "0" * 40
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FIELDS = {
    "schema",
    "benchmark",
    "device",
    "machine",
    "versions",
    "commit",
    "load",
    "created",
    "ceilings",
    "settings",
    "rows",
    "notes",
}


@pytest.fixture(autouse=True)
def named_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the tests run without a history, on a GPU machine or from an sdist."""
    monkeypatch.setenv("BENCHMARK_COMMIT", COMMIT)


def check_file(path: Path, benchmark: str, peers: set[str]) -> list[dict[str, Any]]:
    result: dict[str, Any] = json.loads(path.read_text())
    assert set(result) == FIELDS
    assert (result["schema"], result["benchmark"]) == (harness.SCHEMA, benchmark)
    assert result["machine"]["name"]
    assert len(result["commit"]["source"]) == 64
    assert result["versions"]["torch"] == torch.__version__
    assert {row["peer"] for row in result["rows"]} == peers
    for row in result["rows"]:
        timing = row["timing"]
        assert 0 < timing["best"] <= timing["low"] <= timing["median"] <= timing["high"]
        assert row["roof"] > 0
        beside = {other["peer"] for other in result["rows"] if other["case"] == row["case"]}
        assert set(row["ratio_to"]) == beside - {row["peer"]}
    rows: list[dict[str, Any]] = result["rows"]
    return rows


def fixed_suite() -> harness.Suite:
    suite = harness.Suite("bench_fixed", CPU, harness.Ceilings(copy_gbps=10, matmul_tflops=1))
    timings = {
        "eager": harness.Timing(4e-3, 3e-3, 5e-3, 2e-3, 9),
        "qfuse": harness.Timing(1e-3, 1e-3, 1e-3, 1e-3, 9),
    }
    suite.add({"N": 1}, timings, roof=5e-4, extra={"qfuse": {"saved_bytes": 7}})
    return suite


def test_timing_takes_the_median_and_percentiles() -> None:
    timing = harness.Timing.of([5.0, 1.0, 2.0, 3.0, 4.0, 100.0])
    assert timing == harness.Timing(median=3.5, low=2.0, high=5.0, best=1.0, samples=6)


def test_roof_is_the_larger_of_the_two_bounds() -> None:
    ceilings = harness.Ceilings(copy_gbps=100, matmul_tflops=2)
    assert ceilings.roof(bytes=1e11) == 1.0
    assert ceilings.roof(flops=4e12, bytes=1e11) == 2.0


def test_every_round_rotates_the_order() -> None:
    assert list(harness.rotations("abc", 4)) == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


@pytest.mark.parametrize("timer", [harness.time_kernels, harness.time_steps])
def test_timers_rank_a_slow_call_behind_a_fast_one(timer: Any) -> None:
    calls = {"slow": lambda: time.sleep(0.02), "fast": lambda: time.sleep(0.002)}
    timings = timer(calls, CPU, rounds=2)
    assert 0.02 <= timings["slow"].best < 0.1
    assert timings["fast"].best < timings["slow"].best


def test_on_a_cpu_peers_take_turns_call_by_call() -> None:
    made: list[str] = []
    harness.time_kernels({n: functools.partial(made.append, n) for n in "ab"}, CPU, rounds=3)
    measured = "".join(made[-16:])  # behind what warms up, estimates and counts each peer alone
    assert measured in ("abba" * 4, "baab" * 4)


def test_table_and_numbers_of_a_suite(capsys: pytest.CaptureFixture[str]) -> None:
    suite = fixed_suite()
    assert suite.ratio({"N": 1}, "qfuse", "eager") == 0.25
    assert suite.ratio({"N": 2}, "qfuse", "eager") is None
    suite.statistic = "best"
    assert suite.ratio({"N": 1}, "qfuse", "eager") == 0.5
    suite.statistic = "median"
    harness.console.print(suite.table(extras=("saved_bytes",)))
    shown = capsys.readouterr().out
    for text in ("1 ms (50%)", "saved 7 B", "0.25", "500 us"):
        assert text in shown


def test_saved_file_and_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    suite = fixed_suite()
    rows = check_file(suite.save(tmp_path / "deep" / "x.json"), "bench_fixed", {"eager", "qfuse"})
    assert rows[1]["roof_fraction"] == 0.5
    assert rows[1]["ratio_to"] == {"eager": 0.25}
    result = origin.read(tmp_path / "deep" / "x.json")
    path = plots.draw(result, tmp_path / "x.png")
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")
    assert plots.shown_in(path.read_bytes()) == plots.fingerprint(result)


def drawn_without_pyplot(name: str) -> Any:
    """Draw a committed result, and leave matplotlib's windows as they are."""
    matplotlib = pytest.importorskip("matplotlib.figure")
    result = origin.read(RESULTS / f"{name}.json")

    class Pyplot:
        @staticmethod
        def subplots(*args: Any, figsize: Any, **settings: Any) -> Any:
            figure = matplotlib.Figure(figsize=figsize)
            return figure, figure.subplots(*args, **settings)

    return plots.KINDS[result["benchmark"]](Pyplot, result)


def test_plot_of_products_in_eight_bits() -> None:
    [model] = origin.read(RESULTS / "compute_quality_large-h100.json")["models"]
    losses, apart, cosines = drawn_without_pyplot("compute_quality_large-h100").axes

    def drawn(axes: Any) -> dict[str, Any]:
        return {line.get_label(): line for line in axes.lines if line.get_label()[0] != "_"}

    assert [*drawn(losses)] == ["eager", "bf16", "fp8"]
    assert [*drawn(apart)] == [*drawn(cosines)] == ["bf16", "fp8"]
    last = {(run["variant"], run["seed"]): run["curve"][-1] for run in model["runs"]}
    assert drawn(losses)["fp8"].get_xdata()[-1] == 495  # the middle of the last ten steps
    mean = statistics.fmean(last["fp8", seed] for seed in range(3))
    assert drawn(losses)["fp8"].get_ydata()[-1] == pytest.approx(mean)
    ratios = statistics.fmean(last["fp8", seed] / last["eager", seed] for seed in range(3))
    assert drawn(apart)["fp8"].get_ydata()[-1] == pytest.approx(100 * (ratios - 1))
    by_layer = model["cosines"]["fp8"]["by_layer"]
    assert [*drawn(cosines)["fp8"].get_ydata()] == [*by_layer.values()]


def test_without_a_commit_nothing_is_measured_that_would_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BENCHMARK_COMMIT")
    monkeypatch.setattr(origin, "ROOT", tmp_path)  # no history
    monkeypatch.setattr(harness, "measure_ceilings", lambda *a, **k: harness.Ceilings(1, 1))
    parser = harness.parser("")
    command = ["--device", "cpu", "--quick"]
    with pytest.raises(SystemExit, match=r"x\.json has no id .*: set BENCHMARK_COMMIT"):
        harness.start("bench_x", parser.parse_args([*command, "--out", str(tmp_path / "x.json")]))
    suite = harness.start("bench_x", parser.parse_args(command))
    with pytest.raises(origin.MissingOrigin, match="no id"):
        suite.save(tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()


def test_a_brief_run_is_bounded_and_writes_into_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[str]] = []

    def fake(command: list[str], timeout: float | None) -> subprocess.CompletedProcess[str]:
        assert timeout is not None and timeout <= 100
        seen.append(command[2:])
        if "benchmarks.bench_kbit" in command:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", fake)
    assert (
        run_benchmarks(["--brief", "--limit", "100", "--out", str(tmp_path / "r"), "--seed", "3"])
        == 1
    )
    tail = ["--seed", "3", "--out", str(tmp_path / "r")]
    assert seen == [[f"benchmarks.{name}", *options, *tail] for name, options in BRIEF.items()]
    assert capsys.readouterr().err.splitlines()[-1] == "failed or out of time: bench_kbit"
    seen.clear()
    assert run_benchmarks(["--only", "bench_kbit", "--limit", "0"]) == 1 and not seen
    file = harness.save_path("bench_step", harness.parser("").parse_args(tail[2:]), CPU)
    assert file == tmp_path / "r" / "step-cpu.json"


def test_units() -> None:
    assert [harness.duration(s) for s in (3.71e-5, 0.0718, 12.34)] == [
        "37.1 us",
        "71.8 ms",
        "12.3 s",
    ]
    assert [harness.size(b) for b in (12, 1.5e6, 7.2e9)] == ["12 B", "1.5 MB", "7.2 GB"]


def test_peer_names_carry_options() -> None:
    peer = "qfuse[qfuse.passes=-extend_k;max_autotune=True;qfuse.preset=none]"
    assert peer_options(peer) == {
        "qfuse.passes": "-extend_k",
        "max_autotune": True,
        "qfuse.preset": "none",
    }
    assert peer_options("qfuse") is None
    assert peer_options("inductor[triton.cudagraphs=True]") == {"triton.cudagraphs": True}
    with pytest.raises(ValueError, match="no peer 'tvm'"):
        harness.compile_as("tvm", torch.sin)


def test_device_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(SystemExit, match="torch sees no CUDA device"):
        bench_dequantize.main(["--device", "cuda", "--quick"])


def test_bench_dequantize(tmp_path: Path) -> None:
    out = tmp_path / "dequantize.json"
    peers = ["copy", "bitsandbytes", "op"]
    command = ["--device", "cpu", "--shapes", "64x128", "--rounds", "1", "--out", str(out)]
    bench_dequantize.main([*command, "--quick", "--backends", *peers])
    rows = check_file(out, "bench_dequantize", set(peers))
    assert all(row["extra"]["gbps"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("verb", "peers"),
    [("dequantize", ["copy", "bitsandbytes", "op"]), ("quantize", ["copy", "op"])],
)
def test_bench_kbit(tmp_path: Path, verb: str, peers: list[str]) -> None:
    out = tmp_path / "kbit.json"
    command = ["--device", "cpu", "--quick", "--rounds", "1", "--verbs", verb, "--out", str(out)]
    suite = bench_kbit.main([*command, "--bits", "2", "5", "--backends", *peers])
    rows = check_file(out, "bench_kbit", set(peers))
    assert [(c["K"], c["absmax"], c["run"]) for c in suite.cases()] == [
        (k, absmax, "single") for k in (2, 5) for absmax in ("e4m4", "fp16")
    ]
    assert all(row["extra"]["gbps"] > 0 for row in rows)
    assert len(suite.notes) == 4
    assert suite.notes[0].startswith(f"{verb} 2 e4m4 single: ")
    assert ("bitsandbytes" in suite.notes[0]) == (verb == "dequantize")


def test_bench_decode(tmp_path: Path) -> None:
    out = tmp_path / "decode.json"
    command = [
        "--device",
        "cpu",
        "--quick",
        "--rounds",
        "1",
        "--adapted",
        "r=16",
        "--out",
        str(out),
    ]
    with no_codegen():
        bench_decode.main([*command, "--backends", "qfuse"])
    (row,) = check_file(out, "bench_decode", {"qfuse"})
    assert (row["extra"]["graphs"], row["extra"]["breaks"]) == (1, 0)
    assert row["extra"]["error"] < 0.02


def test_a_sequence_is_timed_a_call_at_a_time() -> None:
    calls = [lambda: time.sleep(0.005)] * 4
    timing = harness.time_kernels({"four": harness.in_sequence(calls, CPU)}, CPU, rounds=1)
    assert 0.005 <= timing["four"].per(4).best < 0.02


def test_bench_linear(tmp_path: Path) -> None:
    out = tmp_path / "linear.json"
    command = ["--device", "cpu", "--quick", "--rounds", "1", "--out", str(out)]
    bench_linear.main([*command, "--backends", "matmul", "eager"])
    rows = check_file(out, "bench_linear", {"matmul", "eager"})
    passes = [(row["case"]["M"], row["case"]["pass"]) for row in rows if row["peer"] == "eager"]
    assert passes == [(1, "fwd"), (128, "fwd"), (128, "fwd+bwd")]
    eager = rows[-1]["extra"]
    assert eager["error_to_eager"] == 1.0
    assert eager["saved_bytes"] > 0


@pytest.mark.parametrize("device", DEVICES)
def test_bench_adapter(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / f"adapter-{device}.json"
    command = ["--device", device, "--rounds", "1", "--out", str(out), "--rows", "1024"]
    command += ["--quick"] if device == "cpu" else ["--columns", "1024"]
    bench_adapter.main([*command, "--ranks", "16", "64"])
    rows = check_file(out, "bench_adapter", set(bench_adapter.PEERS))
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        assert 0 < row["extra"]["error"] < 2**-8
        op, n, m, rank = (row["case"][key] for key in ("op", "N", "M", "rank"))
        moved = 2 * (m * n + (m + n) * rank) + 2 * (
            (m + n) * rank if op == "adapter_grads" else m * n
        )
        assert row["extra"]["gbps"] == pytest.approx(moved / row["timing"]["median"] / 1e9)
        on_gpu = row["peer"] == "qfuse" and device == "cuda"
        is_refused = on_gpu and op == "adapter_grads" and rank == 64
        assert ("refused" in row["extra"]) is is_refused
        if row["peer"] == "qfuse":
            first = "triton" if on_gpu and not is_refused else "reference"
            assert row["extra"]["served_by"] == first

    refused = json.loads(out.read_text())
    refused["rows"][-1]["extra"]["refused"] = "64 ranks are too many"
    (tmp_path / f"refused-{device}.json").write_text(json.dumps(refused))
    monkeypatch.setattr(read_results, "RESULTS", tmp_path)
    for op in bench_adapter.OPS:
        shown = figures.adapter(op, f"refused-{device}").splitlines()
        assert shown[0].count("kernel / torch") == 2 and "r = 64" in shown[0]
        assert shown[2].startswith(f"| {rows[0]['case']['N']} | 1024 |")
        assert ("|  |  |  |" in shown[2]) is ("64 ranks are too many." in "".join(shown))
    assert "cuBLAS serves the op: 64 ranks are too many." in shown[4]


def has(format: str) -> str:
    """Return the name of a format that this CPU can make; skip with the reason where it cannot."""
    if reason := bench_formats.FORMATS[format].missing(CPU):
        pytest.skip(reason)
    return format


def test_formats_that_cannot_be_made_are_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    int4, fp8 = bench_formats.FORMATS["int4_g128"], bench_formats.FORMATS["fp8_row"]
    monkeypatch.setattr(bench_formats, "find_spec", lambda name: None)
    assert fp8.missing(CPU) == "torchao is not installed"
    monkeypatch.setattr(bench_formats, "find_spec", lambda name: True)
    assert (int4.missing(CPU), fp8.missing(CPU)) == ("torchao packs it on a GPU", "")
    assert int4.missing(torch.device("cuda")) == ""
    suite = bench_formats.main(["--device", "cpu", "--quick", "--formats", "int4_g128"])
    assert suite.notes == ["without int4_g128: torchao packs it on a GPU"] and not suite.rows


def test_fp8_tiles_are_decoded_as_transformers_does() -> None:
    fp8: Any = pytest.importorskip("transformers.integrations.finegrained_fp8")
    layer = bench_formats._fp8_tiles(bench_formats._random_linear(256, 384, CPU))
    decode: Any = fp8.Fp8Dequantize(None)._dequantize_one
    exact = decode(layer.weight.data, layer.weight_scale_inv, torch.bfloat16)
    assert torch.equal(bench_formats._of_tiles(layer), exact)


@pytest.mark.parametrize(
    "format",
    [
        name if name in ("fp8_128x128", "llm_int8") else pytest.param(name, marks=pytest.mark.slow)
        for name in bench_formats.FORMATS
    ],
)
def test_bench_formats_decodes_and_fuses_every_format(tmp_path: Path, format: str) -> None:
    """The library's values, seven layers of seven in qfuse's form, and eager's losses."""
    out, peers = tmp_path / "formats.json", {"eager", "qfuse"}
    command = ["--device", "cpu", "--quick", "--rounds", "1", "--loss-steps", "2"]
    command += ["--out", str(out), "--formats", has(format), "--backends", "eager", "qfuse"]
    with no_codegen():
        bench_formats.main(command)
    rows = check_file(out, "bench_formats", peers)
    cases = [(row["case"]["part"], row["peer"]) for row in rows]
    assert cases == [(part, peer) for part in bench_formats.PARTS for peer in sorted(peers)]
    linear, step = rows[3]["extra"], rows[5]["extra"]
    assert linear["error"] < 2**-7
    assert step["fused"] == "7 of 7" and step["breaks"] == 0
    assert step["loss_deviation"] < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_bench_formats(tmp_path: Path, device: str) -> None:
    """With generated code: of every format on a GPU, of two on a CPU, where others take minutes."""
    pytest.importorskip("torchao")
    out = tmp_path / "formats.json"
    command = ["--device", device, "--quick", "--rounds", "1", "--layers", "1", "--out", str(out)]
    wanted = ["nvfp4", "int8_g64"] if device == "cpu" else list(bench_formats.FORMATS)
    suite = bench_formats.main([*command, "--formats", *wanted])
    rows = check_file(out, "bench_formats", set(bench_formats.PEERS))
    made = {row["case"]["format"] for row in rows}
    assert made == {n for n in wanted if not bench_formats.FORMATS[n].missing(suite.device)}
    for row in rows:
        if row["case"]["part"] == "step":
            assert row["extra"]["loss_deviation"] < 0.01


@pytest.mark.slow
def test_bench_thresholds_of_wide_products(tmp_path: Path) -> None:
    out = tmp_path / "wide.json"
    command = ["--device", "cpu", "--quick", "--rounds", "1", "--wide", "--out", str(out)]
    bench_thresholds.main(command)
    rows = json.loads(out.read_text())["rows"]
    found = {(row["case"]["what"], row["peer"]) for row in rows}
    assert found == {(what, p) for what in ("x W'", "dY W") for p in ("bfloat16", "float32")}
    assert all(row["timing"]["median"] > 0 for row in rows)


@pytest.mark.slow
def test_bench_trainers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    out = tmp_path / "trainers.json"
    command = ["--device", "cpu", "--scripts", "Trainer", "--steps", "4", "--out", str(out)]
    command += ["--caches", str(tmp_path / "caches")]
    peers = ["qfuse", "eager", "eager[no cuDNN]"]
    bench_trainers.main([*command, "--together", "--backends", *peers])
    eager, ours, same = json.loads(out.read_text())["rows"]
    assert ours["extra"]["cold"]
    bench_trainers.main([*command, "--backends", "qfuse"])
    [again] = json.loads(out.read_text())["rows"]
    assert not again["extra"]["cold"]
    assert again["extra"]["compile_s"] < ours["extra"]["compile_s"]
    assert (eager["peer"], ours["peer"]) == ("eager", "qfuse")
    assert same["extra"]["loss_deviation"] == 0  # a CPU has no cuDNN
    assert ours["extra"]["loss_deviation"] < 0.01 and ours["extra"]["compile_s"] > 0
    assert "14 of 14 quantized layers fused" in ours["extra"]["line"]


def test_a_deviation_is_not_relative_to_a_loss_of_nothing() -> None:
    assert bench_trainers.deviation([2.0, 1.1], [2.0, 1.0]) == pytest.approx(0.1)
    assert bench_trainers.deviation([2.0, 1e-3], [2.0, 0.0, 5.0]) == pytest.approx(0.05)


def test_padded_scripts_need_a_file_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_trainers.main(["--device", "cpu", "--pad", "8"])
    assert "name a file by --out" in capsys.readouterr().err


def test_a_script_is_run_as_no_unknown_peer(tmp_path: Path) -> None:
    command = ["--device", "cpu", "--out", str(tmp_path / "x.json"), "--backends", "nobody"]
    with pytest.raises(SystemExit, match="'nobody': there are eager"):
        bench_trainers.main(command)


def test_bench_moe_in_fp8(tmp_path: Path) -> None:
    out = tmp_path / "fp8.json"
    command = ["--device", "cpu", "--quick", "--rounds", "1", "--out", str(out)]
    bench_moe.main([*command, "--backends", "qfuse", "fp8"])
    rows = check_file(out, "bench_moe", {"qfuse", "fp8"})
    errors = {row["peer"]: row["extra"]["error"] for row in rows}
    assert errors["qfuse"] < 0.005 < errors["fp8"] < 0.04


@pytest.mark.parametrize("format", bench_moe.FORMATS)
def test_experts_of_bench_moe_are_those_of_the_library(format: str) -> None:
    pytest.importorskip(bench_moe.FORMATS[format][1])
    layer, _ = bench_moe._layers("tiny", 16, 8, 1, CPU, format)
    decoded = layer.packed.decode().view(layer.shape)
    assert torch.equal(bench_moe._values(layer, torch.bfloat16), decoded)


def test_bench_moe_in_another_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchao")
    command = ["--device", "cpu", "--quick", "--rounds", "1", "--format", "nvfp4"]
    bench_moe.main([*command, "--passes", "fwd", "--out", str(tmp_path)])
    [file] = tmp_path.iterdir()
    assert file.name.startswith("moe_nvfp4-")
    rows = check_file(file, "bench_moe_nvfp4", {"torchao", *bench_moe.PEERS[1:]})
    assert all(row["extra"]["error_to_torchao"] < 1.25 for row in rows)
    with pytest.raises(SystemExit):
        bench_moe.main([*command, "--backends", "bitsandbytes"])
    assert "bitsandbytes: --format nvfp4 is torchao's" in capsys.readouterr().err


def test_bench_moe_in_tiles_of_fp8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    command = ["--device", "cpu", "--quick", "--rounds", "1", "--format", "fp8_128x128"]
    bench_moe.main([*command, "--out", str(tmp_path)])
    [file] = tmp_path.iterdir()
    rows = check_file(file, "bench_moe_fp8_128x128", {"transformers", *bench_moe.PEERS[1:]})
    assert [row["case"]["pass"] for row in rows] == ["fwd"] * 4 + ["fwd+bwd"] * 4
    assert all(row["extra"]["error_to_transformers"] < 1.25 for row in rows)
    with pytest.raises(SystemExit):
        bench_moe.main([*command, "--models", "tiny", "gpt-oss-20b"])
    assert "gpt-oss-20b's experts are (5760, 2880)" in capsys.readouterr().err
    arguments = argparse.Namespace(
        quick=False, cases="many", models=None, tokens=None, format="fp8_128x128"
    )
    listed = [name for name, _ in bench_moe._cases(arguments, "cuda")]
    assert "Mixtral" in listed and "E128 2880" not in listed


def test_bench_moe(tmp_path: Path) -> None:
    out = tmp_path / "moe.json"
    command = ["--device", "cpu", "--quick", "--rounds", "1", "--out", str(out)]
    bench_moe.main(command)
    rows = check_file(out, "bench_moe", set(bench_moe.PEERS))
    peers = len(bench_moe.PEERS)
    assert [row["case"]["pass"] for row in rows] == ["fwd"] * peers + ["fwd+bwd"] * peers
    assert all(row["extra"]["error_to_bitsandbytes"] < 1.25 for row in rows)


def test_bench_moe_of_few_tokens(tmp_path: Path) -> None:
    out = tmp_path / "few.json"
    command = ["--device", "cpu", "--cases", "few", "--ranks", "0", "8", "--rounds", "1"]
    bench_moe.main([*command, "--out", str(out)])
    rows = check_file(out, "bench_moe", set(bench_moe.PEERS))
    cases = [(row["case"]["T"], row["case"]["r"], row["case"]["pass"]) for row in rows]
    assert list(dict.fromkeys(cases)) == [(t, r, "fwd") for t in (1, 4, 16) for r in (0, 8)]
    assert all(row["extra"]["error_to_bitsandbytes"] < 1.25 for row in rows)
    assert bench_moe.CASES["few"]["cuda"] == [
        *(("Qwen3-30B-A3B", tokens) for tokens in (1, 4, 16)),
        *(("gpt-oss-20b", tokens) for tokens in (1, 4, 16)),
    ]


def test_bench_moe_in_graphs() -> None:
    """On a CPU, where a graph of calls is one call after the other."""
    layers = bench_moe._layers("tiny", 2, 8, 1, CPU)
    arguments = argparse.Namespace(format="nf4", backends=list(bench_moe.PEERS))
    dense = bench_moe._values(layers[0], torch.bfloat16)
    found = bench_moe._in_graphs(arguments, layers, dense, 1)
    assert found.keys() == set(bench_moe.PEERS)
    assert min(found.values()) > 0
    chosen = {tuple(bench_moe._rerouted(layers, s)[0].routing.offsets.tolist()) for s in range(9)}
    assert len(chosen) > 1


@pytest.mark.parametrize("tokens", [1, 16])
def test_the_roof_of_experts_counts_those_with_rows(tokens: int) -> None:
    layer, _ = bench_moe._layers("tiny", tokens, 8, 1, CPU)
    suite = argparse.Namespace(ceilings=harness.Ceilings(1.0, 1e30))
    active = {1: 2, 16: 4}[tokens]  # of four experts, two for each token
    packed = sum(t.nbytes for t in layer.packed.operands) * active / 4
    expected = 1e-9 * (packed + layer.x.nbytes + layer.grad.nbytes)  # at 1 GB a second
    assert bench_moe._roof(suite, layer, ways=1) == pytest.approx(expected)  # type: ignore[arg-type]


@pytest.mark.slow
def test_bench_moe_model(tmp_path: Path) -> None:
    out = tmp_path / "model.json"
    command = ["--device", "cpu", "--quick", "--rounds", "1", "--out", str(out)]
    command += ["--backends", "eager", "packed", "--loss-steps", "2"]
    bench_moe_model.main([*command, "--adapt", "attention + experts"])
    rows = check_file(out, "bench_moe_model", {"eager", "packed"})
    assert [row["extra"]["breaks"] for row in rows] == [0, 0]
    assert rows[1]["extra"]["loss_deviation"] < 0.01


def test_bench_moe_model_has_recipes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--device", "cpu", "--quick", "--rounds", "1", "--out", str(tmp_path)]
    command += ["--backends", "eager", "--loss-steps", "2", "--recipe", "checkpointed"]
    suite = bench_moe_model.main(command)
    [file] = tmp_path.iterdir()
    assert file.name.startswith("moe_model_checkpointed-")
    [found] = check_file(file, "bench_moe_model_checkpointed", {"eager"})
    assert found["case"]["LoRA on"] == "attention"
    assert suite.settings["adapter_dtype"] == "fp32"
    assert suite.settings["recipe"]["name"] == "checkpointed"
    with pytest.raises(SystemExit):
        bench_moe_model.main([*command, "--adapt", "attention + experts"])
    assert "no dropout for target_parameters" in capsys.readouterr().err


def test_experts_in_fp8_under_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where thresholds allow it all products are in eight bits; where not, the result says why."""
    least = ",".join(f"{name}=1" for name in ANY_EXPERT)
    peers = ["qfuse[qfuse.compute=fp8]", f"packed[qfuse.compute=fp8;qfuse.thresholds={least}]"]
    out = tmp_path / "fp8.json"
    command = ["--device", "cpu", "--quick", "--rounds", "1", "--out", str(out)]
    command += ["--backends", *peers, "eager", "--loss-steps", "2", "--recipe", "checkpointed"]
    with no_codegen():
        suite = bench_moe_model.main(command)
    rows = check_file(out, "bench_moe_model_checkpointed", {"eager", *peers})
    eager, few, every = (row["extra"] for row in rows)
    assert [eager["breaks"], few["breaks"], every["breaks"]] == [0, 0, 0]
    assert "in_eight_bits" not in eager
    some, products = few["in_eight_bits"]
    assert (some, sum(few["in_16_bits"].values())) == (0, products)
    assert any("quantize_products.min_expert_elements" in why for why in few["in_16_bits"])
    assert (every["in_eight_bits"], every["in_16_bits"]) == ([products, products], {})
    assert 0 < every["loss_deviation"] < 0.01
    assert f"{peers[0]}: 0 of {products} products" in suite.notes[0]
    assert peers[0] in capsys.readouterr().out
    assert suite.notes[1].startswith(f"{peers[1]}: {products} of {products} products")
    with pytest.raises(SystemExit):
        bench_moe_model.main([*command, "--backends", "pakced"])
    assert "--backends pakced: known are eager" in capsys.readouterr().err


@pytest.mark.parametrize("packed", [False, True], ids=["untouched", "quantized"])
@pytest.mark.parametrize(
    ("recipe", "base", "adapters"),
    [
        ("checkpointed", torch.bfloat16, torch.float32),
        ("trl", torch.float32, torch.bfloat16),
    ],
)
def test_recipes_of_bench_moe_model_train_the_model_of_their_name(
    recipe: str, base: torch.dtype, adapters: torch.dtype, packed: bool
) -> None:
    chosen = RECIPES[recipe]
    config = bench_moe_model._config(1, on_gpu=False)
    model = bench_moe_model.moe_model(config, CPU, chosen, packed=packed, experts=False)
    assert {p.dtype for p in testing.adapter_parameters(model)} == {adapters}
    assert model.get_input_embeddings().weight.dtype == base
    assert model.is_gradient_checkpointing
    assert model.base_model.model.model.layers[0].self_attn.q_proj.lora_dropout["default"].p == 0.05
    bench_step.loss_of(model, chosen)(torch.randint(0, 64, (2, 14))).backward()
    assert all(p.grad is not None for p in testing.adapter_parameters(model))


@pytest.mark.slow
@pytest.mark.parametrize("adapted", bench_experts.ADAPT)
@pytest.mark.parametrize("device", DEVICES)
def test_bench_experts(tmp_path: Path, device: str, adapted: str) -> None:
    out = tmp_path / "experts.json"
    command = ["--device", device, "--quick", "--rounds", "1", "--out", str(out)]
    bench_experts.main([*command, "--models", "tiny", "--tokens", "64", "--adapt", adapted])
    rows = check_file(out, "bench_experts", set(bench_experts.PEERS))
    static = {row["peer"]: row["extra"]["static_bytes"] for row in rows}
    assert static["packed"] == static["qfuse"] < static["eager"] == static["grouped_mm"]
    for row in rows:
        whole = row["extra"]["static_bytes"]
        assert (row["extra"]["weight_bytes"] < whole) == (adapted == "experts")
        assert row["extra"]["breaks"] == 0
        assert row["extra"]["error_to_eager"] < 1.5
        assert row["extra"]["grad_error_to_eager"] < 1.5
        assert device == "cpu" or row["extra"]["peak_bytes"] > 0


@pytest.mark.parametrize("adapted", bench_experts.ADAPT)
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize(
    ("peer", "format"), [("eager", "nf4_b64"), ("packed", "nf4_b64"), ("packed", "mxfp4")]
)
def test_exact_experts_are_those_of_the_module(
    monkeypatch: pytest.MonkeyPatch, family: str, adapted: str, peer: str, format: str
) -> None:
    """Adapters included, in either layout: far from what other adapters give."""
    monkeypatch.setitem(bench_experts.MODELS, "small", (family, 4, 64, 96, 2))
    inputs = bench_experts._inputs("small", 32, adapted, CPU, 0)
    module = bench_experts._module("small", peer, inputs, format)
    held = [stack.format for _, stack in stacks(module)]
    assert held == (2 * [format] if peer == "packed" else [])
    got = bench_experts._step(module, module, inputs)[:2]
    for one, exact in zip(got, bench_experts._exact(module, inputs), strict=True):
        assert (one - exact).norm() < 0.02 * exact.norm()
    if inputs.adapters:
        other = bench_experts._inputs("small", 32, adapted, CPU, 1)
        mixed = dataclasses.replace(inputs, adapters=other.adapters)
        for one, exact in zip(got, bench_experts._exact(module, mixed), strict=True):
            assert (one - exact).norm() > 0.1 * exact.norm()


@pytest.mark.slow
def test_bench_attention(tmp_path: Path) -> None:
    out = tmp_path / "attention.json"
    bench_attention.main(["--device", "cpu", "--quick", "--out", str(out)])
    rows = check_file(out, "bench_attention", set(bench_attention.PEERS))
    assert all(row["extra"]["error"] < 0.01 for row in rows)


@pytest.mark.slow
def test_bench_loss(tmp_path: Path) -> None:
    out = tmp_path / "loss.json"
    bench_loss.main(["--device", "cpu", "--quick", "--out", str(out)])
    rows = check_file(out, "bench_loss", set(bench_loss.PEERS))
    assert all(row["extra"]["error"] < 0.01 for row in rows)
    command = ["--device", "cpu", "--quick", "--backends", "whole", "128", "--out", str(out)]
    bench_loss.main([*command, "--head", "float32", "--tokens", "24", "40"])
    cases = [
        (row["case"]["shape"], row["case"]["head"]) for row in json.loads(out.read_text())["rows"]
    ]
    assert cases[::2] == cases[1::2] == [("24x16x300", "float32"), ("40x16x300", "float32")]


def test_bench_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    bench_rows.main(["--device", "cpu", "--quick", "--out", str(out)])
    rows = check_file(out, "bench_rows", {*bench_rows.PEERS} - {"torchao"})
    errors = [row["extra"]["error"] for row in rows if row["peer"] not in ("dense", "adapter")]
    assert errors and max(errors) < 0.01


@pytest.mark.parametrize("name", ["kbit3_e4m4", "mxfp4", "nvfp4_tiles"])
def test_bench_rows_of_other_weights(name: str, tmp_path: Path) -> None:
    """The layers of torchao have the values that ours have."""
    out = tmp_path / "rows.json"
    command = ["--device", "cpu", "--quick", "--formats", name, "--rows", "2"]
    bench_rows.main([*command, "--out", str(out)])
    missing = {"bitsandbytes", "torchao"} if name.startswith("kbit") else {"bitsandbytes"}
    rows = check_file(out, "bench_rows", {*bench_rows.PEERS} - missing)
    assert all(row["case"]["format"] == name for row in rows)
    assert {row["case"]["rows"] for row in rows} == {2}
    errors = [row["extra"]["error"] for row in rows if row["peer"] not in ("dense", "adapter")]
    assert errors and max(errors) < 0.01


def test_bench_rows_compiles_many(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    formats = ["nf4_b64_nested", "kbit2_e4m4"]
    command = ["--device", "cpu", "--quick", "--formats", *formats, "--rows", "33"]
    bench_rows.main([*command, "--backends", "decode", "qfuse", "adapter", "--out", str(out)])
    rows = check_file(out, "bench_rows", {"decode", "qfuse", "adapter"})
    assert [row["case"]["format"] for row in rows[::3]] == formats
    errors = {(r["case"]["format"], r["peer"]): r["extra"].get("error") for r in rows}
    for format in formats:
        assert errors[format, "qfuse"] == pytest.approx(errors[format, "decode"], rel=1e-3)
        assert errors[format, "adapter"] is None  # another weight
    report = inductor_q.last_report()
    assert report is not None
    assert report.applied()["canonicalize"] == 1  # as a layer is compiled


def test_bench_rows_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where a graph of calls is one call after the other."""
    monkeypatch.setattr(bench_rows, "GRAPH_BYTES", 40_000)
    weight = torch.randn(96, 128).bfloat16()
    packed, x = bench_rows._bnb(weight), torch.randn(2, 128).bfloat16()
    layers = bench_rows._of_few_rows(bench_rows.BNB, weight.shape)
    peers = ("bitsandbytes", "decode", "dense", "qfuse", "adapter")
    with torch.no_grad():
        found = bench_rows._in_graphs(peers, bench_rows.BNB, packed, weight, layers, x, 1)
    assert found.keys() == set(peers)
    assert min(found.values()) > 0


def test_plot_of_rows_has_each_format() -> None:
    figure = drawn_without_pyplot("rows_kbit_cuda-h100")
    titles = [axes.get_title() for axes in figure.axes]
    assert len(titles) == 16
    assert titles[0] == "kbit2_e4m4 12288x4096" and titles[-1] == "kbit5_e4m4 1024x4096"
    lines = {line.get_label(): line for line in figure.axes[-1].lines}
    name, case = "rows_kbit_cuda-h100", {"format": "kbit5_e4m4", "shape": "1024x4096", "rows": 32}
    [row] = [
        row
        for row in origin.read(RESULTS / f"{name}.json")["rows"]
        if row["peer"] == "qfuse" and row["case"] == case
    ]
    assert [*lines["qfuse"].get_xdata()] == [1, 4, 8, 16, 32]
    assert lines["qfuse"].get_ydata()[-1] == pytest.approx(1e6 * row["extra"]["graph_s"])


def test_bench_launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "launch.json"
    command = ["--device", "cpu", "--quick", "--calls", "5", "--out", str(out)]
    bench_launch.main(command)
    rows = check_file(out, "bench_launch", {"qfuse", "op", "bitsandbytes"})
    assert all(row["extra"]["wall_s"] >= row["timing"]["best"] for row in rows)
    assert "without jit: Triton does not launch on cpu" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench_launch.main([*command, "--backends", "cuda"])
    assert "no peer cuda; known: qfuse, runner, jit, op, bitsandbytes" in capsys.readouterr().err


def test_bench_walks(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    out = tmp_path / "walks.json"
    bench_walks.main(["--device", "cpu", "--quick", "--rounds", "1", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    calls = ("train", "num_parameters", "parameters", "zero_grad", "reference pass")
    expected = [(call, peer) for call in calls for peer in ("trainer", "qfuse")]
    assert [(row["case"]["call"], row["peer"]) for row in rows] == expected
    assert all(row["timing"]["best"] > 0 and row["case"]["layers"] == 1 for row in rows)


def test_bench_moe_of_a_config_by_rank_pass_and_devices(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        num_experts=8, moe_intermediate_size=32, hidden_size=64, num_experts_per_tok=2
    )
    config.save_pretrained(tmp_path / "small")
    assert bench_moe.sizes(str(tmp_path / "small")) == (8, 64, 64, 2)
    out = tmp_path / "moe.json"
    command = ["--device", "cpu", "--quick", "--rounds", "1", "--out", str(out)]
    command += ["--models", str(tmp_path / "small"), "--tokens", "4", "--ranks", "8", "0"]
    bench_moe.main([*command, "--passes", "fwd", "dX", "dA/dB", "--ep", "4"])
    rows = check_file(out, "bench_moe", set(bench_moe.PARALLEL_PEERS))
    assert {(r["case"]["model"], r["case"]["T"], r["case"]["ep"]) for r in rows} == {
        ("small", 4, 4)
    }
    passes = [(row["case"]["r"], row["case"]["pass"]) for row in rows if row["peer"] == "qfuse"]
    assert passes == [(0, "fwd"), (0, "dX"), (8, "fwd"), (8, "dX"), (8, "dA/dB")]
    for row in rows:
        assert row["extra"]["error_to_bitsandbytes"] < 1.25
        over = row["case"]["r"] == 8 and row["case"]["pass"] != "dA/dB"
        assert ("overhead" in row["extra"]) == over


def test_expert_parallel_layers_have_the_rows_of_their_experts() -> None:
    """Sentinels are nobody's rows; masked, they are the last expert's, with gates of zero."""
    skipped, masked = bench_moe._layers("tiny", 16, 8, 2, CPU)
    rows = skipped.routing.offsets[-1]
    assert 0 < rows < 32 and masked.routing.offsets[-1] == 32
    assert skipped.gates is not None and masked.gates is not None
    assert int((masked.gates > 0).sum()) == rows
    assert skipped.shape == (2, *bench_moe.MODELS["tiny"][1:3])
    torch.testing.assert_close(bench_moe._exact(skipped), bench_moe._exact(masked))


@pytest.mark.parametrize("product", bench_tiles.PRODUCTS)
def test_bench_tiles_has_the_products_of_a_layer(product: str) -> None:
    """Each is one that the Triton kernel would take on a GPU, of the sizes of its case."""
    call = bench_tiles.make("tiny", 12, product, CPU)
    assert not scatter2scatter_triton.unfit(call)
    y, rank = serve("scatter2scatter", call)
    assert y.shape == (24 if call.grouped_out else 12, call.out_features)
    assert rank.shape == (24, bench_tiles.RANK) and y.any()
    features = {"up": 128, "down": 64, "up dX": 64, "down dX": 64}
    assert scatter2scatter_triton.work(call).out_features == features[product]


def test_bench_tiles_is_for_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_tiles.main(["--device", "cpu", "--quick"])
    assert "tiles are those of a GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_gpu_bench_tiles(tmp_path: Path) -> None:
    out = tmp_path / "tiles.json"
    command = ["--models", "tiny", "--tokens", "64", "--tiles", "3", "--workers", "2"]
    bench_tiles.main([*command, "--quick", "--out", str(out)])
    rows = check_file(out, "bench_tiles", set(bench_tiles.PEERS))
    assert len(rows) == 2 * len(bench_tiles.PRODUCTS)


def test_bench_moe_knows_its_peers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_moe.main(["--device", "cpu", "--backends", "scattermoe"])
    assert "no peer scattermoe; known: bitsandbytes" in capsys.readouterr().err


def test_bits_and_noise_of_k_bit_formats() -> None:
    rows = {row["format"]: row for row in bench_kbit_quality.numbers(1 << 16, CPU)}
    assert rows["kbit3_e4m4"]["bits_per_element"] == 3.25
    assert rows["kbit2_fp16"]["bits_per_element"] == 2.5
    assert rows["nf4_b64"]["bits_per_element"] == 4.5
    assert rows["kbit3_e4m4"]["sqnr_db"] == pytest.approx(15, abs=0.2)
    assert rows["kbit4_e4m4"]["sqnr_db"] > rows["nf4_b64"]["sqnr_db"]
    errors = bench_kbit_quality.scales(1 << 16, CPU)
    assert errors["mean"] == pytest.approx(0.0113, abs=5e-4)
    assert errors["mean"] < errors["p95"] < errors["max"] <= 1 / 32


@pytest.mark.slow
def test_bench_kbit_quality(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "quality.json"
    formats = ["bf16", "nf4_b64", "kbit2_e4m4", "3.5 bits"]
    sizes = ["--device", "cpu", "--size", "tiny", "--base-steps", "60", "--steps", "4"]
    command = [*sizes, "--numel", "4096", "--out", str(out), "--formats", *formats]
    bench_kbit_quality.main(command)
    rows = {row["format"]: row for row in json.loads(out.read_text())["model"]["rows"]}
    assert list(rows) == formats
    bits = {name: row["bits_per_element"] for name, row in rows.items()}
    assert (bits["bf16"], bits["nf4_b64"], bits["kbit2_e4m4"]) == (16, 4.5, 2.25)
    assert 3.4 < bits["3.5 bits"] <= 3.5
    assert rows["kbit2_e4m4"]["before"] > rows["bf16"]["before"]
    assert all(len(row["fine_tuning"]) == 4 for row in rows.values())
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_cosines_of_gradients_by_layer_and_product() -> None:
    name = "base_model.model.model.layers.{}.mlp.{}.lora_A.default.weight"
    up, down = name.format(0, "up_proj"), name.format(0, "down_proj")
    other = name.format(1, "up_proj")
    x, y = torch.tensor([1.0, 0.0]).double(), torch.tensor([0.0, 1.0]).double()
    found = bench_compute_quality._cosines(
        [{up: x, down: x, other: x}], [{up: 3 * x, down: x + y, other: -x}]
    )
    assert found["by_layer"] == {"0": pytest.approx(4 / (2 * 11) ** 0.5), "1": pytest.approx(-1)}
    assert found["by_product"] == {
        "up_proj": pytest.approx(2 / 20**0.5),
        "down_proj": pytest.approx(0.5**0.5),
    }
    assert found["least_of_a_matrix"] == pytest.approx(-1)


def test_held_out_losses_are_compared_seed_by_seed() -> None:
    losses = {"eager": (2.0, 4.0), "bf16": (2.0, 4.0), "fp8": (2.02, 3.96)}
    runs = [{"variant": v, "held_out": loss} for v, of in losses.items() for loss in of]
    found = bench_compute_quality._compared(runs)
    assert found["fp8"]["relative"] == pytest.approx(0.0)
    assert abs(found["fp8"]["farthest"]) == pytest.approx(0.01)
    assert found["bf16"] == {"mean": 3.0, "spread": 2.0, "relative": 0.0, "farthest": 0.0}


@pytest.mark.slow
def test_bench_compute_quality(tmp_path: Path) -> None:
    out = tmp_path / "quality.json"
    steps = ["--base-steps", "40", "--steps", "4", "--seeds", "1", "--variants", "bf16", "fp8"]
    bench_compute_quality.main(["--device", "cpu", "--sizes", "tiny", *steps, "--out", str(out)])
    (found,) = json.loads(out.read_text())["models"]
    assert [run["variant"] for run in found["runs"]] == ["eager", "bf16", "fp8"]
    products, of = found["runs"][2]["in_eight_bits"]
    assert 0 < products == of
    assert found["base"]["curve"][0] - 1 > found["base"]["held_out"]["book"]
    assert abs(found["held_out"]["fp8"]["relative"]) < 0.01
    cosines = {variant: each["by_layer"]["0"] for variant, each in found["cosines"].items()}
    assert 0.99 < cosines["fp8"] < cosines["bf16"] <= 1.0


def test_bench_compute_outliers(tmp_path: Path) -> None:
    out = tmp_path / "outliers.json"
    sizes = ["--size", "tiny", "--base-steps", "2"]
    bench_compute_outliers.main(["--device", "cpu", *sizes, "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == len(bench_compute_outliers.PRODUCTS) + 4
    errors = {row["outlier"]: row["errors"] for row in rows if row["product"] == "down_proj"}
    assert 0 < errors[0]["int8 token"] < errors[0]["fp8 token"] < 0.04  # half of a unit of 3 bits
    # e4m3 has 2^14 between its smallest normal number and its largest
    assert errors[10_000]["fp8 token"] < 1.2 * errors[0]["fp8 token"]
    assert errors[10_000]["int8 token"] == pytest.approx(1.0, abs=1e-6)


def test_a_rotation_keeps_what_it_casts() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 384).bfloat16()
    for cast in bench_compute_outliers.CASTS.values():
        found = cast(x, torch.float8_e4m3fn)
        assert found.shape == x.shape
        assert float((found - x.double()).norm() / x.double().norm()) < 0.04


@pytest.mark.slow
def test_bench_recipe_trains_in_one_order_and_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers.models.qwen3_5")
    order: list[str] = []

    def compile_as(peer: str, fn: Any) -> Any:  # eager, and says so
        def call(*args: Any, **kwargs: Any) -> Any:
            if "logits" in kwargs:
                order.append(peer)
            return fn(*args, **kwargs)

        return call

    monkeypatch.setattr(harness, "compile_as", compile_as)
    out = tmp_path / "recipe.json"
    command = ["--device", "cpu", "--quick", "--steps", "2", "--out", str(out)]
    suite = bench_recipe.main(command)
    rows = check_file(out, "bench_recipe", {"inductor", "qfuse", "broken"})
    outside = bench_recipe._backend("broken")
    once = ["inductor", "qfuse", outside]
    stock, ours, broken = (4 * [peer] for peer in once)
    assert order == [*once, *stock, *ours, *broken, *broken, *ours, *stock]
    # A layer of each kind, and the loss. The triangular system is solved by torch's operator.
    assert suite.settings["breaks"] == 0
    assert len(suite.settings["nodes"]) == 3
    assert max(suite.settings["nodes"]) < 400
    # Out of the graph: the MLP of both layers, and q, k, v and o of one.
    assert suite.settings["broken"]["calls_outside_of_the_graph"] == 6
    assert [row["extra"]["breaks"] for row in rows] == [0, 0, suite.settings["broken"]["breaks"]]
    reasons = suite.settings["broken"]["break_reasons"]
    assert len(reasons) >= 6 and all("torch.compiler.disable" in text for text in reasons)
    for row in rows:
        assert len(row["extra"]["steps_per_s"]) == len(row["extra"]["speedup"]) == 2
        assert row["extra"]["final_loss"] < row["extra"]["first_loss"]
        assert row["extra"]["loss_deviation"] == row["extra"]["round_deviation"] == 0
    assert [note.partition(":")[0] for note in suite.notes] == [
        "round 1, steps/s",
        "round 2, steps/s",
        "qfuse / inductor",
        "qfuse / broken",
        "broken / inductor",
    ]


@pytest.mark.slow
def test_layers_share_the_code_around_a_break_and_peers_do_not() -> None:
    """A recompilation for each layer would end in eager, or here in an error, at 24 of them."""
    pytest.importorskip("transformers.models.qwen3_5")
    ran: list[int] = []

    def backend_of(peer: str) -> Any:
        def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
            def run(*args: Any) -> Any:
                ran.append(1)
                return graph.forward(*args)

            return run

        return functools.partial(torch.compile, backend=backend, dynamic=False)

    def recompiles(layers: int) -> int:
        config = bench_recipe._config(layers, on_gpu=False)
        model = testing.qlora_model(config, r=4)
        model.enable_input_require_grads()
        entry = functools.partial(
            bench_recipe._entry, model=model, put=bench_recipe._exits(model), whole=False
        )
        torch.compiler.reset()
        ids = torch.zeros(1, 8, dtype=torch.long)
        with bench_recipe._tracing(["inductor", "broken"]), testing.CompileTrace() as trace:
            stock = entry(backend_of("inductor"))
            broken = entry(backend_of("broken"), outside=True)
            for enter, graphs in ((stock, layers + 1), (broken, 0), (stock, layers + 1)):
                ran.clear()
                enter()(input_ids=ids, labels=ids)
                assert len(ran) == graphs or (not graphs and len(ran) > 2 * layers)
        return len(trace.recompiles)

    assert recompiles(12) == recompiles(8)


def test_stock_inductor_is_two_backends_to_dynamo() -> None:
    """Of equal backends it runs code of one for the other, also where the one broke its graph."""
    wrapper: Any = torch._TorchCompileInductorWrapper
    options = peer_options(bench_recipe._backend("broken"))
    stock, broken = wrapper(None, None, False), wrapper(None, options, False)
    assert stock == wrapper(None, None, False) and stock != broken
    assert torch._inductor.config.triton.cudagraphs is False, "the option is at its default"


@pytest.mark.slow
def test_bench_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers.models.qwen3_5")
    monkeypatch.setenv("QFUSE_STRICT", "1")  # every linear of both kinds of layer is fused
    out = tmp_path / "recipe.json"
    peers = ["eager", "inductor", "qfuse", "broken"]
    command = ["--device", "cpu", "--quick", "--steps", "5", "--out", str(out)]
    bench_recipe.main([*command, "--backends", *peers])
    rows = check_file(out, "bench_recipe", set(peers))
    assert [row["extra"]["graphs"] for row in rows[:3]] == [0, 3, 3]
    assert [row["extra"]["breaks"] for row in rows[:3]] == [0, 0, 0]
    assert rows[3]["extra"]["graphs"] > rows[3]["extra"]["breaks"] // 2 > 2
    assert all(row["extra"]["loss_deviation"] < 0.01 for row in rows)
    assert all(row["extra"]["compile_s"] > 0 for row in rows[1:])


@pytest.mark.parametrize(
    ("recipe", "base", "adapters", "checkpointed"),
    [
        ("trainer", torch.bfloat16, torch.float32, False),
        ("checkpointed", torch.bfloat16, torch.float32, True),
        ("prepared", torch.float32, torch.float32, True),
        ("trl", torch.float32, torch.bfloat16, True),
    ],
)
def test_recipes_of_bench_step_train_the_model_of_their_name(
    recipe: str, base: torch.dtype, adapters: torch.dtype, checkpointed: bool
) -> None:
    chosen = RECIPES[recipe]
    arguments = argparse.Namespace(rank=4, adapter_dtype=chosen.adapters, seed=0)
    config = testing.tiny_qwen3_config(num_hidden_layers=1)
    model = bench_step._model(arguments, config, CPU, chosen)
    assert {p.dtype for p in testing.adapter_parameters(model)} == {adapters}
    assert model.get_input_embeddings().weight.dtype == base
    assert model.is_gradient_checkpointing == checkpointed
    ids = torch.randint(0, 64, (2, 14))
    assert chosen.inputs(ids)["attention_mask"].sum() == 26
    seen: list[torch.dtype] = []  # of what flows from layer to layer
    layer = model.base_model.model.model.layers[0]
    layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].dtype))
    bench_step.loss_of(model, chosen)(ids).backward()
    assert set(seen) == {base}
    assert all(p.grad is not None for p in testing.adapter_parameters(model))


def test_accumulated_batches_count_as_their_mean() -> None:
    """A step of the optimizer over three batches takes the mean of their gradients and losses."""
    weight = torch.nn.Parameter(torch.zeros(3))
    ids = torch.tensor([[1.0, 2.0, 6.0]])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    seen: list[list[float]] = []

    def step(batch: torch.Tensor) -> torch.Tensor:
        seen.append(batch[0].tolist())
        return (batch[0] * weight).sum() + batch[0, 0]

    loss = bench_step.full_step(optimizer, step, ids, accumulated=3)()
    assert seen == [[1, 2, 6], [6, 1, 2], [2, 6, 1]]
    assert float(loss) == pytest.approx(3)
    assert weight.detach().tolist() == pytest.approx([-3, -3, -3])


def test_exposed_communication_is_what_nothing_else_covers() -> None:
    spans = [(True, 0, 10), (False, 2, 5), (False, 4, 6), (True, 8, 12), (False, 11, 20)]
    assert bench_ranks.exposed(spans) == 2 + (11 - 6)
    assert bench_ranks.exposed([(False, 0, 10)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, fused, tolerance",
    [
        (["--wraps", "fsdp2", "fsdp2-parts", "fsdp2-packed-kept-parts"], "7 of 7", 0.02),
        (["--wraps", "fsdp2", "--recipe", "trl"], "7 of 7", 0.1),  # other masks of dropout
        (["--large"], "7 of 7", 0.02),
        (["--wraps", "experts"], "6 of 6", 0.02),
    ],
    ids=["fsdp2", "trl", "large", "experts"],
)
def test_bench_ranks(options: list[str], fused: str, tolerance: float, tmp_path: Path) -> None:
    out = tmp_path / "ranks.json"
    sizes = ["--device", "cpu", "--quick", "--layers", "1", "--steps", "2", "--threads", "1"]
    peers = ["--backends", "eager", "qfuse", "--out", str(out)]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, "-m", "benchmarks.bench_ranks", *sizes, *peers, *options]
    subprocess.run(command, env=environment(), check=True, timeout=500)
    rows = [row["extra"] for row in json.loads(out.read_text())["rows"]]
    for eager, qfuse in zip(rows[::2], rows[1::2], strict=True):
        assert (qfuse["breaks"], qfuse["graphs"], qfuse["fused"]) == (0, 1, fused)
        assert qfuse["loss"] == pytest.approx(eager["loss"], abs=tolerance)


@pytest.mark.slow
def test_bench_memory(tmp_path: Path) -> None:
    """Each peer has a row, alone and checkpointed; less budget plans less, and computes again."""
    out = tmp_path / "memory.json"
    bench_memory.main(["--device", "cpu", "--quick", "--backends", "qfuse", "--out", str(out)])
    names = ("qfuse", "qfuse at 0.35", "qfuse, checkpointed")
    whole, less, checkpointed = check_file(out, "bench_memory", set(names))
    assert [row["peer"] for row in (whole, less, checkpointed)] == list(names)
    assert whole["extra"]["recomputed_bytes"] == 0 < less["extra"]["recomputed_bytes"]
    assert less["extra"]["planned_bytes"] < whole["extra"]["planned_bytes"]
    assert "planned_bytes" not in checkpointed["extra"]


def test_recipes_give_the_masks_that_they_say() -> None:
    ids = torch.ones(2, 14, dtype=torch.long)
    assert "attention_mask" not in Recipe().inputs(ids)
    ones, padded = (Recipe(mask=mask).inputs(ids) for mask in ("ones", "padded"))
    assert bool(ones["attention_mask"].all()) and torch.equal(ones["labels"], ids)
    assert padded["attention_mask"].sum(1).tolist() == [14, 12]
    assert torch.equal(padded["labels"] == -100, padded["attention_mask"] == 0)


def test_parts_differ_in_dropout_and_share_their_tensors() -> None:
    """Without dropout the twin computes what a model that PEFT made without it does."""
    config = testing.tiny_qwen3_config(num_hidden_layers=1)
    model, plain = (testing.qlora_model(config, dropout=p) for p in (0.05, 0.0))
    twin = bench_parts.sharing(model, bench_parts.PLAIN)
    assert [*map(id, twin.parameters())] == [*map(id, model.parameters())]
    assert repr(twin) == repr(plain) != repr(model)
    ids = torch.arange(8)[None]
    assert torch.equal(twin(input_ids=ids).logits, plain(input_ids=ids).logits)


@pytest.mark.slow
def test_bench_parts(tmp_path: Path) -> None:
    """Each peer has a row for each variant, over its plain step, and each goal has its ratio."""
    out, peers = tmp_path / "parts.json", {"inductor", "qfuse"}
    before = counters["stats"]["unique_graphs"]
    suite = bench_parts.main(["--device", "cpu", "--quick", "--out", str(out)])
    rows = check_file(out, "bench_parts", peers)
    found = [(row["case"]["variant"], row["peer"]) for row in rows]
    assert found == [(name, peer) for name in bench_parts.VARIANTS for peer in sorted(peers)]
    assert [row["extra"]["time_over_plain"] for row in rows[:2]] == [1, 1]
    # The two kinds of mask share theirs, and none is compiled again while steps take turns.
    assert counters["stats"]["unique_graphs"] - before == len(peers) * (
        len(bench_parts.VARIANTS) - 1
    )
    assert len(suite.notes) == len(bench_parts.GOALS) * len(peers)


@pytest.mark.slow
def test_bench_step(tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    command = ["--device", "cpu", "--quick", "--rounds", "1", "--loss-steps", "3"]
    bench_step.main([*command, "--layers", "1", "--out", str(out)])
    rows = {row["peer"]: row for row in check_file(out, "bench_step", set(harness.PEERS))}
    for peer in ("inductor", "qfuse"):
        extra = rows[peer]["extra"]
        assert extra["breaks"] == 0
        assert extra["graphs"] <= 2
        assert extra["loss_deviation"] < 0.02
        assert extra["compile_s"] > 0
    saved = {peer: rows[peer]["extra"]["saved_bytes"] for peer in harness.PEERS}
    # Of rank 16 beside 64 channels, a low-rank tensor saved or recomputed is a visible share.
    assert saved["qfuse"] <= 1.05 * saved["inductor"] < saved["eager"]
