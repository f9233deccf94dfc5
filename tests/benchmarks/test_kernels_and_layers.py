"""Benchmarks of single kernels and layers run on the smallest sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

for extra in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(extra)

import inductor_q  # noqa: E402
from benchmarks import (  # noqa: E402
    bench_adapter,
    bench_attention,
    bench_decode,
    bench_dequantize,
    bench_kbit,
    bench_launch,
    bench_linear,
    bench_loss,
    bench_rows,
    bench_thresholds,
)
from docs import figures, read_results  # noqa: E402
from tests.support.benchmark_runs import DEVICES, check_file  # noqa: E402
from tests.support.compiling import no_codegen  # noqa: E402


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
        assert ("|  |  |  |" in shown[2]) is ("cuBLAS serves the op" in "".join(shown))
    assert "cuBLAS serves the op: 64 ranks are too many." in shown[4]


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
