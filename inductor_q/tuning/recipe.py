"""Train a model as people do: transformers' Trainer, LoRA on NF4, gradient checkpointing, bf16."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from torch import nn

from inductor_q.diagnostics.named import build

BATCH = 2


def names_a_factory(word: str) -> bool:
    """Return whether this is `package.module:factory`, and no script."""
    return ":" in word and not os.path.exists(word)


def model(factory: str = "") -> nn.Module:
    """Build the user's model, or where there is none a small one: two layers of Qwen3-8B's shapes
    on a GPU, of 64 channels on a CPU."""
    if factory:
        return build(factory)
    from inductor_q import testing

    on_gpu = torch.cuda.is_available()
    config = testing.qwen3_8b_config(2) if on_gpu else testing.tiny_qwen3_config()
    made: nn.Module = testing.qlora_model(config, prepare=True, device="cuda" if on_gpu else "cpu")
    return made


def sizes(made: nn.Module) -> dict[str, int]:
    """Return the sizes of a step that thresholds compare."""
    rows = BATCH * _length()
    return {"rows": rows, "positions": _length(), "logits": rows * _vocabulary(made)}


def train(made: nn.Module, steps: int) -> None:
    """Train on random tokens, the same in every process."""
    from transformers import Trainer, TrainingArguments, default_data_collator

    from inductor_q.integrations import QfuseCallback

    generator = torch.Generator().manual_seed(0)
    shape = (BATCH * steps, _length())
    tokens = torch.randint(0, _vocabulary(made), shape, generator=generator)
    rows: Any = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            learning_rate=2e-4,
            bf16=True,
            gradient_checkpointing=True,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        Trainer(
            made,
            arguments,
            data_collator=default_data_collator,
            train_dataset=rows,
            callbacks=[QfuseCallback()],
        ).train()


def _length() -> int:
    return 512 if torch.cuda.is_available() else 64


def _vocabulary(made: nn.Module) -> int:
    config: Any = getattr(made, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(text.vocab_size)
