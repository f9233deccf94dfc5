"""Train small QLoRA models with transformers' and TRL's trainers, in eager mode and with qfuse."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from examples.finetune import TEXT
from inductor_q import testing
from tests.support.compiling import no_codegen

COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}


@dataclass
class Run:
    """Hold what a training has logged and compiled."""

    log: list[dict[str, Any]]
    graphs: int
    breaks: list[str]
    recompiles: list[str]

    def logged(self, key: str) -> list[float]:
        return [float(entry[key]) for entry in self.log if key in entry]


def texts(count: int, seed: int = 0, shortest: int = 20, longest: int = 120) -> list[str]:
    """Cut pieces of different lengths from a real text."""
    whole, choose = TEXT.read_text(encoding="utf-8"), random.Random(seed)
    starts = [choose.randrange(len(whole) - longest) for _ in range(count)]
    return [whole[start : start + choose.randint(shortest, longest)] for start in starts]


def model(layers: int = 1) -> Any:
    """Make a small QLoRA model."""
    config = testing.tiny_qwen3_config(num_hidden_layers=layers, pad_token_id=258)
    return testing.qlora_model(config, adapter_dtype=torch.bfloat16)


def _flag_layers(model: Any) -> None:
    """Set the flag that bitsandbytes sets on a CPU with AVX512-BF16, where evaluation packs its
    weights. On other CPUs it would multiply what it has packed as if it had not."""
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = True


def train(
    make: Callable[[], Any],
    *,
    compiled: bool,
    codegen: bool = False,
    resume: str | None = None,
    **settings: Any,
) -> Run:
    """Train with the trainer that `make` returns, from its start or from the checkpoint `resume`;
    `settings` are those of `compile_trainer`."""
    import transformers

    from inductor_q.integrations import compile_trainer  # which names the backend to accelerate

    torch.compiler.reset()
    transformers.set_seed(0)
    trainer = make()
    if compiled:
        _flag_layers(trainer.model)
        compile_trainer(trainer, **settings)
    without = contextlib.nullcontext() if codegen else no_codegen()
    with testing.CompileTrace() as trace, without:
        trainer.train(resume_from_checkpoint=resume)
    return Run(trainer.state.log_history, trace.graphs, trace.breaks, trace.recompiles)


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Make rows of tokens for transformers' Trainer, of different lengths."""
    encode = testing.ByteTokenizer().encode
    return [{"input_ids": encode(text)} for text in texts(count, seed)]
