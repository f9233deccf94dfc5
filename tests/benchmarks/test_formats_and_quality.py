"""Benchmarks of formats, and of what fewer bits cost a model, run on the smallest sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

for extra in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(extra)

from benchmarks import (  # noqa: E402
    bench_compute_outliers,
    bench_compute_quality,
    bench_formats,
    bench_kbit_quality,
)
from tests.support.benchmark_runs import CPU, DEVICES, check_file  # noqa: E402
from tests.support.compiling import no_codegen  # noqa: E402


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
        for name in bench_formats.PACKED
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


def test_bench_formats_of_weights_that_are_not_quantized(tmp_path: Path) -> None:
    out, fp8 = tmp_path / "formats.json", "qfuse[qfuse.compute=fp8]"
    command = ["--device", "cpu", "--quick", "--rounds", "1", "--loss-steps", "2"]
    command += ["--out", str(out), "--formats", "bf16", "--backends", "eager", fp8]
    with no_codegen():
        bench_formats.main(command)
    rows = {
        (r["case"]["part"], r["peer"]): r["extra"]
        for r in check_file(out, "bench_formats", {"eager", fp8})
    }
    assert rows.keys() == {(part, peer) for part in ("linear", "step") for peer in ("eager", fp8)}
    assert rows["linear", "eager"]["error"] < 2**-7
    assert 0 < rows["step", fp8]["loss_deviation"] < 0.01


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
