"""Fine-tune a QLoRA model with TRL's SFTTrainer; qfuse is one import and one callback.

python -m examples.sft                                            # a toy model, on a CPU too
python -m examples.sft --model Qwen/Qwen3-8B --steps 500 --packing
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from examples.common import load, paragraphs, parser
from inductor_q.integrations import QfuseCallback


def main(argv: Sequence[str] | None = None) -> Any:
    options = parser(__doc__)
    options.add_argument("--packing", action="store_true", help="fill sequences with documents")
    args = options.parse_args(argv)
    model, tokenizer = load(args.model)
    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            output_dir=args.output,
            max_steps=args.steps,
            max_length=args.length,
            pad_to_multiple_of=args.pad,
            packing=args.packing,
            per_device_train_batch_size=2,
            learning_rate=2e-4,
            logging_steps=1,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Dataset.from_dict({"text": paragraphs(args.data)}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        callbacks=[QfuseCallback(profile=args.profile)],
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
