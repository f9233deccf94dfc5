"""Train preferences with TRL's DPOTrainer; the reference is the same model without its adapter.

Each paragraph is a prompt; the one that follows it is preferred to the one before.

python -m examples.dpo                                            # a toy model, on a CPU too
python -m examples.dpo --model Qwen/Qwen3-8B --steps 500
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

from examples.common import load, paragraphs, parser
from inductor_q.integrations import QfuseCallback


def main(argv: Sequence[str] | None = None) -> Any:
    args = parser(__doc__).parse_args(argv)
    model, tokenizer = load(args.model)
    parts = paragraphs(args.data)
    trainer = DPOTrainer(
        model,
        args=DPOConfig(
            output_dir=args.output,
            max_steps=args.steps,
            max_length=args.length,
            pad_to_multiple_of=args.pad,
            per_device_train_batch_size=2,
            learning_rate=1e-4,
            logging_steps=1,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Dataset.from_dict(
            {"prompt": parts[1:-1], "chosen": parts[2:], "rejected": parts[:-2]}
        ),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        callbacks=[QfuseCallback(profile=args.profile)],
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
