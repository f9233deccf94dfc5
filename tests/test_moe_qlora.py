"""The example for mixtures of experts, at toy size on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import origin, place
from examples import moe_qlora
from inductor_q import backend
from inductor_q.experts.model import stacks


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("qfuse", marks=pytest.mark.slow)]
)
def test_it_learns_and_saves(backend: str, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    args = ["--steps", "8", "--device", "cpu", "--backend", backend, "--format", "nf4_b64_nested"]
    assert moe_qlora.main([*args, "--save", str(tmp_path), "--json", str(figures)]) == 0
    result = json.loads(figures.read_text())
    assert len(result["loss"]) == 8
    assert result["loss"][-1] < result["loss"][0]
    assert [result[name] for name in ("size", "rank", "batch", "length")] == ["toy", 4, 2, 32]
    assert result["machine"] == place.machine(torch.device("cpu"))
    assert result["versions"] == place.versions()
    assert result["commit"] == origin.commit()
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj"]
    assert (tmp_path / "adapter_model.safetensors").stat().st_size > 4 * result[
        "trained_parameters"
    ]


def built(size: str, format: str) -> Any:
    torch.manual_seed(0)
    config = moe_qlora.configuration(size)
    return moe_qlora.build(config, format, 4, torch.device("cpu"), torch.float32)


def test_experts_as_gpt_oss_ships_them() -> None:
    """They are as large as random weights of 16 bits, and a step reaches every adapter."""
    model = built("toy", "mxfp4")
    found = [stack for _, stack in stacks(model)]
    assert [stack.format for stack in found] == ["mxfp4"] * 2
    for stack in found:
        values = stack.dequantize(torch.float32)
        assert 0.6 < values.std() * values.shape[2] ** 0.5 < 1.6
    ids = torch.arange(64).view(2, 32)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(stack.lora_B is not None and stack.lora_B.grad is not None for stack in found)


def test_the_same_experts_quantized_again() -> None:
    ours, again = (dict(stacks(built("gpt-oss-toy", f))) for f in ("mxfp4", "nf4_b64_nested"))
    assert ours.keys() == again.keys()
    for name, stack in ours.items():
        values = stack.dequantize(torch.float32)
        other = again[name].dequantize(torch.float32).transpose(1, 2)
        assert again[name].format == "nf4_b64_nested"
        error = float((other - values).norm() / values.norm())
        assert 0.01 < error < 0.15  # of MXFP4's 15 values; normal ones have 0.09


def run_within_budget(backend: str, folder: Path, *more: str) -> dict[str, Any]:
    figures = folder / f"{backend}.json"
    args = ["--size", "gpt-oss-toy", "--memory", "16", "--device", "cpu", "--steps", "3"]
    assert moe_qlora.main([*args, "--backend", backend, "--json", str(figures), *more]) == 0
    result: dict[str, Any] = json.loads(figures.read_text())
    return result


def test_a_budget_changes_what_is_not_asked_for(tmp_path: Path) -> None:
    result = run_within_budget("eager", tmp_path)
    names = ("format", "attention", "adapters", "checkpointing", "regions")
    assert [result[n] for n in names] == ["mxfp4", "nf4", "bf16", True, "layers"]
    result = run_within_budget("eager", tmp_path, "--no-checkpointing", "--adapters", "fp32")
    assert [result[n] for n in names] == ["mxfp4", "nf4", "fp32", False, "layers"]


@pytest.mark.slow
def test_layers_and_the_loss_are_graphs(tmp_path: Path) -> None:
    torch.compiler.reset()
    ours = run_within_budget("qfuse", tmp_path)["loss"]
    applied = [{p.name: p.applied for p in report.passes} for report in backend.reports()]
    assert [counts["fuse_scatter2scatter"] for counts in applied] == [4, 0]  # all layers, the loss
    assert [counts["chunk_loss"] for counts in applied] == [0, 1]
    assert ours == pytest.approx(run_within_budget("eager", tmp_path)["loss"], rel=1e-4)


def test_the_large_sizes_are_the_published_ones() -> None:
    qwen, oss = (moe_qlora.configuration(size) for size in ("qwen3-30b-a3b", "gpt-oss-20b"))
    assert (qwen.num_hidden_layers, qwen.num_experts, qwen.moe_intermediate_size) == (48, 128, 768)
    assert (oss.num_hidden_layers, oss.num_local_experts, oss.hidden_size) == (24, 32, 2880)
