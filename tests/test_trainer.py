"""transformers' Trainer on a QLoRA model that was compiled in place, as the README says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import inductor_q
from inductor_q import testing
from tests.support.compiling import SMALL

accelerate = pytest.importorskip("accelerate")
for extra in ("bitsandbytes", "peft", "transformers", "safetensors"):
    pytest.importorskip(extra)

from safetensors.torch import load_file  # noqa: E402
from transformers import Trainer, TrainingArguments  # noqa: E402

from examples.finetune import TEXT  # noqa: E402

STEPS = 3


@dataclass
class Run:
    losses: list[float]
    saved: dict[str, torch.Size]
    trace: testing.CompileTrace


def train(folder: Path, *, compiled: bool) -> Run:
    """Three steps on a real text by the Trainer, which then saves the adapter."""
    torch._dynamo.reset()
    model = testing.qlora_model(
        testing.tiny_llama_config(num_hidden_layers=1), adapter_dtype=torch.bfloat16
    )
    if compiled:
        model.compile(backend=testing.qfuse_backend(), options=SMALL)
    windows = testing.batches(
        TEXT.read_text(encoding="utf-8"),
        testing.ByteTokenizer(),
        batch_size=2,
        seq_len=64,
        steps=STEPS,
    )
    arguments: Any = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    rows: Any = [{"input_ids": ids, "labels": ids} for window in windows for ids in window]
    trainer: Any = Trainer(model=model, args=arguments, train_dataset=rows)
    with testing.CompileTrace() as trace:
        trainer.train()
    trainer.save_model(str(folder))
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    saved = load_file(folder / "adapter_model.safetensors")
    return Run(losses, {name: tensor.shape for name, tensor in saved.items()}, trace)


def test_the_trainer_trains_and_saves_a_model_compiled_in_place(tmp_path: Path) -> None:
    eager = train(tmp_path / "eager", compiled=False)
    compiled = train(tmp_path / "compiled", compiled=True)
    assert (compiled.trace.graphs, compiled.trace.breaks) == (1, [])
    report = inductor_q.last_report()
    assert report is not None
    applied = report.applied()
    assert all(applied[name] for name in ("canonicalize", "fold_lora", "extend_k", "keep_packed"))
    assert len(eager.losses) == STEPS and eager.losses[-1] < 0.99 * eager.losses[0]  # it learns
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-3)
    assert compiled.saved == eager.saved  # no "_orig_mod" in a name


def test_accelerate_takes_no_name_of_a_backend_that_it_does_not_know() -> None:
    """What `TrainingArguments(torch_compile_backend="qfuse")` runs into."""
    with pytest.raises(ValueError, match="not a valid DynamoBackend"):
        accelerate.utils.TorchDynamoPlugin(backend="qfuse")
