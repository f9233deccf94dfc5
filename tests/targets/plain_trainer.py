"""Train by a script that knows no more of qfuse than the name, which accelerate alone refuses."""

from __future__ import annotations

import sys
from typing import Any

from transformers import Trainer, TrainingArguments

from tests.support.compiling import no_codegen
from tests.support.trainers import model, rows


def main(folder: str) -> None:
    arguments: Any = TrainingArguments(
        output_dir=folder,
        max_steps=2,
        per_device_train_batch_size=1,
        gradient_checkpointing=True,
        torch_compile_backend="qfuse",
        report_to=[],
        use_cpu=True,
    )
    data: Any = [{**row, "labels": row["input_ids"]} for row in rows(4)]
    with no_codegen():
        Trainer(model(), arguments, train_dataset=data).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
