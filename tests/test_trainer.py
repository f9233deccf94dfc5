"""transformers' Trainer on a QLoRA model that was compiled in place, as the README says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import inductor_q
from inductor_q import testing
from inductor_q.integrations import prepare_checkpointing
from inductor_q.integrations.backend_name import forget_backend
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


def train(
    folder: Path,
    *,
    compiled: bool,
    backend: Any = None,
    prepare: Callable[[Any], None] = lambda model: None,
    **settings: Any,
) -> Run:
    """Three steps on a real text by the Trainer, which then saves the adapter."""
    torch._dynamo.reset()
    model = testing.qlora_model(
        testing.tiny_llama_config(num_hidden_layers=1), adapter_dtype=torch.bfloat16
    )
    prepare(model)
    if compiled:
        options = SMALL if backend is None else None
        model.compile(backend=backend or testing.qfuse_backend(), options=options)
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
        **settings,
    )
    rows: Any = [{"input_ids": ids, "labels": ids} for window in windows for ids in window]
    trainer: Any = Trainer(model=model, args=arguments, train_dataset=rows)
    with testing.CompileTrace() as trace:
        trainer.train()
    trainer.save_model(str(folder))
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    saved = load_file(folder / "adapter_model.safetensors")
    return Run(losses, {name: tensor.shape for name, tensor in saved.items()}, trace)


@pytest.mark.usefixtures("graph_or_code")
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


@pytest.mark.slow
def test_checkpointing_does_not_break_the_graph_of_a_prepared_model(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "compiled": True,
        "backend": "eager",
    }
    with_hook = train(tmp_path / "hook", **settings)
    without = train(tmp_path / "no hook", prepare=prepare_checkpointing, **settings)
    assert with_hook.trace.breaks
    assert without.trace.breaks == []
    assert without.losses == pytest.approx(with_hook.losses, rel=1e-3)


def test_accelerate_takes_no_name_of_a_backend_that_it_does_not_know() -> None:
    """What `TrainingArguments(torch_compile_backend="qfuse")` without a callback runs into."""
    forget_backend()
    with pytest.raises(ValueError, match="not a valid DynamoBackend"):
        accelerate.utils.TorchDynamoPlugin(backend="qfuse")
