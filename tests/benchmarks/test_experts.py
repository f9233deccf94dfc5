"""Benchmarks of mixtures of experts run on the smallest sizes."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest
import torch

for extra in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(extra)

from benchmarks import (  # noqa: E402
    bench_experts,
    bench_moe,
    bench_moe_model,
    bench_step,
    bench_tiles,
    harness,
)
from benchmarks.recipes import RECIPES  # noqa: E402
from inductor_q import testing  # noqa: E402
from inductor_q.experts.model import stacks  # noqa: E402
from inductor_q.kernels import scatter2scatter_triton  # noqa: E402
from inductor_q.kernels.dispatch import serve  # noqa: E402
from tests.support.benchmark_runs import CPU, DEVICES, check_file  # noqa: E402
from tests.support.compiling import no_codegen  # noqa: E402
from tests.support.thresholds import ANY_EXPERT  # noqa: E402


def test_bench_moe_in_fp8(tmp_path: Path) -> None:
    out = tmp_path / "fp8.json"
    command = ["--device", "cpu", "--quick", "--rounds", "1", "--out", str(out)]
    bench_moe.main([*command, "--backends", "qfuse", "fp8"])
    rows = check_file(out, "bench_moe", {"qfuse", "fp8"})
    errors = {row["peer"]: row["extra"]["error"] for row in rows}
    assert errors["qfuse"] < 0.005 < errors["fp8"] < 0.04


def test_bench_moe_compiled(tmp_path: Path) -> None:
    out = tmp_path / "compiled.json"
    command = ["--device", "cpu", "--quick", "--rounds", "1", "--out", str(out)]
    bench_moe.main([*command, "--backends", "qfuse", "compiled", "--passes", "fwd", "dX"])
    rows = check_file(out, "bench_moe", {"qfuse", "compiled"})
    assert {row["case"]["pass"] for row in rows} == {"fwd", "dX"}
    assert len({row["extra"]["error"] for row in rows}) == 1


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


def test_bench_moe_knows_its_peers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_moe.main(["--device", "cpu", "--backends", "scattermoe"])
    assert "no peer scattermoe; known: bitsandbytes" in capsys.readouterr().err


#: Each kind of peer that has adapters of experts.
OVER_EXPERTS = ["eager", "prepared", "dense", "packed"]


@pytest.mark.slow
def test_bench_moe_model(tmp_path: Path) -> None:
    out = tmp_path / "model.json"
    command = ["--device", "cpu", "--quick", "--rounds", "1", "--out", str(out)]
    peers = OVER_EXPERTS
    command += ["--backends", *peers, "--loss-steps", "2"]
    bench_moe_model.main([*command, "--adapt", "attention + experts"])
    rows = check_file(out, "bench_moe_model", set(peers))
    assert [row["extra"]["breaks"] for row in rows] == [0] * len(peers)
    assert all(row["extra"]["loss_deviation"] < 0.01 for row in rows[1:])


def test_bench_moe_model_has_recipes(tmp_path: Path) -> None:
    command = ["--device", "cpu", "--quick", "--rounds", "1", "--out", str(tmp_path)]
    command += ["--backends", "eager", "--loss-steps", "2", "--recipe", "checkpointed"]
    suite = bench_moe_model.main(command)
    [file] = tmp_path.iterdir()
    assert file.name.startswith("moe_model_checkpointed-")
    [found] = check_file(file, "bench_moe_model_checkpointed", {"eager"})
    assert found["case"]["LoRA on"] == "attention"
    assert suite.settings["adapter_dtype"] == "fp32"
    assert suite.settings["recipe"]["name"] == "checkpointed"
    assert suite.settings["dropout"] == {"attention": 0.05}


@pytest.mark.parametrize("peers", [["eager"], pytest.param(OVER_EXPERTS, marks=pytest.mark.slow)])
def test_bench_moe_model_adapts_experts_without_dropout(tmp_path: Path, peers: list[str]) -> None:
    out = tmp_path / "model.json"
    command = ["--device", "cpu", "--quick", "--rounds", "1", "--out", str(out)]
    command += ["--loss-steps", "2", "--recipe", "checkpointed", "--adapt", "attention + experts"]
    with no_codegen():
        suite = bench_moe_model.main([*command, "--backends", *peers])
    rows = check_file(out, "bench_moe_model_checkpointed", {*peers})
    assert suite.settings["dropout"] == {"attention + experts": 0.0}
    found = {row["peer"]: row["extra"] for row in rows}
    assert all(found[peer]["breaks"] == 0 for peer in peers)
    assert all(extra["loss_deviation"] < 0.01 for extra in found.values())


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
    assert "--backends pakced: known are dense, eager" in capsys.readouterr().err


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
    model = bench_moe_model.moe_model(config, CPU, chosen, packed=packed, adapts_experts=False)
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
