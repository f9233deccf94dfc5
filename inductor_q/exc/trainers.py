"""What a Trainer, or its model, cannot be given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inductor_q.exc.base import QfuseError


class NotATrainer(QfuseError, TypeError):
    """What is to be given a callback takes none."""

    found: str
    message = (
        "compile_trainer takes a Trainer of transformers, or one that is made of it as TRL's are, "
        "and got a {found}. In a loop of your own call inductor_q.compile(model)"
    )


class NoRegion(QfuseError, ValueError):
    message = (
        "{model} names no layers that could be compiled by themselves (_no_split_modules); "
        'compile it with regions="model".'
    )
    model: str


class ReplicatedModel(QfuseError, ValueError):
    """A trainer would run copies of the model in threads (nn.DataParallel), which call what was
    compiled for the original."""

    gpus: int
    message = (
        "{gpus} GPUs are visible to one process, so the trainer would wrap the model in "
        "nn.DataParallel, whose replicas cannot be compiled. Start a process for each GPU: "
        "torchrun --nproc-per-node {gpus} train.py; or set CUDA_VISIBLE_DEVICES=0"
    )


class NormOfOneRank(QfuseError, ValueError):
    """A trainer would clip gradients by another factor on each rank."""

    value: float
    message = (
        "max_grad_norm={value} clips each rank by the norm of its own experts, so that what the "
        "ranks have in common drifts apart. Set max_grad_norm=0.0, or train in a loop of your own "
        "with inductor_q.experts.clip_grad_norm_"
    )


class NoProfileSteps(QfuseError, ValueError):
    message = "profile_steps is {given!r}: name the steps to record, from 1 on, such as (4, 5)"
    given: Any


class OptionsWithoutCompile(QfuseError, ValueError):
    message = (
        "QfuseCallback has {given!j} and enabled=False, so nothing would use them; "
        'drop them, or set enabled=True or enabled="auto".'
    )
    given: Sequence[str]
