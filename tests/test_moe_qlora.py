"""The example for mixtures of experts, at toy size on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import origin, place
from examples import moe_qlora
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


def test_experts_as_gpt_oss_ships_them() -> None:
    """They are as large as random weights of 16 bits, and a step reaches every adapter."""
    model = moe_qlora.build("toy", "mxfp4", 4, torch.device("cpu"), torch.float32)
    found = [stack for _, stack in stacks(model)]
    assert [stack.format for stack in found] == ["mxfp4"] * 2
    for stack in found:
        values = stack.dequantize(torch.float32)
        assert 0.6 < values.std() * values.shape[2] ** 0.5 < 1.6
    ids = torch.arange(64).view(2, 32)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(stack.lora_B is not None and stack.lora_B.grad is not None for stack in found)


def test_the_large_sizes_are_the_published_ones() -> None:
    qwen, oss = (moe_qlora.configuration(size) for size in ("qwen3-30b-a3b", "gpt-oss-20b"))
    assert (qwen.num_hidden_layers, qwen.num_experts, qwen.moe_intermediate_size) == (48, 128, 768)
    assert (oss.num_hidden_layers, oss.num_local_experts, oss.hidden_size) == (24, 32, 2880)
