"""The harness measures what it says, and a run of all benchmarks is what it should be."""

from __future__ import annotations

import functools
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

for extra in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(extra)

from benchmarks import bench_dequantize, harness, origin, plots  # noqa: E402
from benchmarks.__main__ import BRIEF  # noqa: E402
from benchmarks.__main__ import run as run_benchmarks  # noqa: E402
from benchmarks.peers import peer_options  # noqa: E402
from tests.support.benchmark_runs import CPU, check_file  # noqa: E402


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


def test_a_sequence_is_timed_a_call_at_a_time() -> None:
    calls = [lambda: time.sleep(0.005)] * 4
    timing = harness.time_kernels({"four": harness.in_sequence(calls, CPU)}, CPU, rounds=1)
    assert 0.005 <= timing["four"].per(4).best < 0.02


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
