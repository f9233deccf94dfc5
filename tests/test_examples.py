"""The examples with trainers, as they are shipped, at toy size on a text of the repository."""

from __future__ import annotations

import contextlib
import importlib
import json
from pathlib import Path

import pytest
import torch

import inductor_q
from inductor_q import testing
from tests.support.compiling import no_codegen

for extra in ("accelerate", "bitsandbytes", "datasets", "peft", "transformers", "trl"):
    pytest.importorskip(extra)


#: DPO's reference pass and the Trainer's evaluation are modes of their own.
MODES = {"sft": 1, "dpo": 2, "trainer": 2}


def run(name: str, out: Path, *options: str, codegen: bool, steps: int = 4) -> list[float]:
    """Run an example for some steps; every layer has to be fused, without a break, in at most two
    graphs for each mode."""
    torch.compiler.reset()
    main = importlib.import_module(f"examples.{name}").main
    command = ["--steps", str(steps), "--length", "96", "--output", str(out), *options]
    with contextlib.nullcontext() if codegen else no_codegen():
        trainer = main(command)
    report = inductor_q.report(trainer.model)
    assert report.is_clean and report.fused == len(report.layers) == 14
    assert report.graphs <= 2 * MODES[name]
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
def test_sft(tmp_path: Path) -> None:
    losses = run("sft", tmp_path, "--packing", codegen=False)
    assert len(losses) == 4 and losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODES)
def test_a_hundred_batches(name: str, tmp_path: Path) -> None:
    assert len(run(name, tmp_path, codegen=False, steps=100)) == 100


def test_generate_needs_a_time_between_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(SystemExit):
        importlib.import_module("examples.generate").main(["--tokens", "1"])
    assert "--tokens=1: give 2 or more" in capsys.readouterr().err


def test_generate(capsys: pytest.CaptureFixture[str]) -> None:
    """One graph serves all steps, which write what eager writes."""
    main = importlib.import_module("examples.generate").main
    with no_codegen():
        eager, ours = main(["--tokens", "8", "--backends", "eager", "qfuse"])
    assert (ours.graphs, ours.breaks, len(ours.tokens)) == (1, 0, 8)
    assert ours.tokens[:2] == eager.tokens[:2]
    assert "tokens/s" in capsys.readouterr().out
    report = inductor_q.last_report()
    assert report is not None
    applied = report.applied()
    assert (applied["canonicalize"], applied["group_queries"]) == (14, 2)


def test_models_to_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    small = importlib.import_module("examples.small")
    assert small.toy().config.num_hidden_layers == 2
    monkeypatch.setattr(small, "_qlora", lambda config: config)
    config = small.qwen3_0_6b()
    linears = 2 * 16 * 128 + 2 * 8 * 128 + 3 * config.intermediate_size
    weights = config.hidden_size * (config.num_hidden_layers * linears + config.vocab_size)
    assert config.head_dim == 128 and round(weights / 1e9, 2) == 0.6
    assert testing.qwen3_5_0_8b_config(4, vocab_size=1000).vocab_size == 1000
    config = small.qwen3_5_0_8b_sixth()
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert small.qwen3_5_0_8b().layer_types.count("full_attention") == 6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "dpo", "trainer"])
def test_with_code(name: str, tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    assert len(run(name, tmp_path, "--profile", str(traces), codegen=True)) == 4
    assert json.loads((traces / "trace.rank0.json").read_text())["traceEvents"]
