"""Say what trainers do with a model beside running it: the recipes of the steps.

``benchmark`` is the bare step. ``trainer`` is what transformers' Trainer and TRL do with PEFT's
defaults under bf16: an attention_mask with padding, float32 adapters under autocast, LoRA dropout
of 0.05. ``checkpointed`` is the same with gradient checkpointing, ``packed`` has documents packed
in a row, told apart by ``position_ids``, autocast, dropout and checkpointing (use ``--batch 1
--seq-len 8192``). In these, all that is not quantized is bfloat16. In ``prepared`` it is float32,
and with it what flows from layer to layer: that is ``checkpointed`` after PEFT's
``prepare_model_for_kbit_training``. ``trl`` has this and bfloat16 adapters, as TRL's SFTTrainer
(1.16) makes a model that it loads by name in 4 bits; the loss is the model's, not TRL's own.
``surogate`` is the step of Surogate's published rates: 2 x 2048 tokens of packed documents, four
such batches to a step of the optimizer, r = 16, bfloat16, no dropout. Who recomputes there by
default is compared with ``surogate-checkpointed``.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a trainer does with the model beside running it; by default nothing."""

    #: "ones" is a mask of ones; in "padded" the last sequence ends in a seventh of padding
    mask: Literal["none", "ones", "padded"] = "none"
    documents: int = 1  # packed in each sequence
    autocast: bool = False  # to bfloat16
    adapters: str = "fp32"  # under autocast; without it, --adapter-dtype
    dropout: float = 0.0
    checkpointed: bool = False
    prepared: bool = False  # embeddings, norms and head in float32
    accumulated: int = 1  # batches to a step of the optimizer

    @property
    def adapter_dtype(self) -> torch.dtype:
        return torch.float32 if self.autocast and self.adapters == "fp32" else torch.bfloat16

    def inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """The keyword arguments of one batch."""
        given = {"input_ids": ids, "labels": ids}
        if self.mask != "none":
            mask = torch.ones_like(ids)
            if self.mask == "padded":
                mask[-1, -(ids.shape[1] // 7) :] = 0
            given |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        if self.documents > 1:
            place = torch.arange(ids.shape[1], device=ids.device)
            positions = place % -(-ids.shape[1] // self.documents)
            given["position_ids"] = positions.expand_as(ids).contiguous()
        return given


BENCHMARK = Recipe()
TRAINER = Recipe(mask="padded", autocast=True, dropout=0.05)
PREPARED = dataclasses.replace(TRAINER, checkpointed=True, prepared=True)
SUROGATE = Recipe(documents=8, accumulated=4)

RECIPES = {
    "benchmark": BENCHMARK,
    "trainer": TRAINER,
    "checkpointed": dataclasses.replace(TRAINER, checkpointed=True),
    "prepared": PREPARED,
    "trl": dataclasses.replace(PREPARED, adapters="bf16"),
    "packed": dataclasses.replace(TRAINER, mask="none", documents=8, checkpointed=True),
    "surogate": SUROGATE,
    "surogate-checkpointed": dataclasses.replace(SUROGATE, checkpointed=True),
}
