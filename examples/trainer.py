"""Fine-tune a QLoRA model with transformers' Trainer, with evaluation and checkpointing.

python -m examples.trainer                                        # a toy model, on a CPU too
python -m examples.trainer --model Qwen/Qwen3-8B --steps 500
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

from examples.common import load, paragraphs, parser
from inductor_q.integrations import QfuseCallback


def main(argv: Sequence[str] | None = None) -> Any:
    args = parser(__doc__).parse_args(argv)
    model, tokenizer = load(args.model)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(prepare_model_for_kbit_training(model), lora)
    tokens = tokenizer(paragraphs(args.data), truncation=True, max_length=args.length)
    rows: Any = [{"input_ids": ids} for ids in tokens["input_ids"]]
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=args.output,
            max_steps=args.steps,
            per_device_train_batch_size=2,
            learning_rate=2e-4,
            bf16=True,
            gradient_checkpointing=True,
            eval_strategy="steps",
            eval_steps=max(args.steps // 2, 1),
            logging_steps=1,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        ),
        data_collator=DataCollatorForLanguageModeling(
            tokenizer, mlm=False, pad_to_multiple_of=args.pad
        ),
        train_dataset=rows[4:],
        eval_dataset=rows[:4],
        callbacks=[QfuseCallback(profile=args.profile)],
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
