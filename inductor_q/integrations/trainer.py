"""Train with qfuse under transformers' Trainer, and TRL's trainers, which are made of it.

    trainer = SFTTrainer(model, args=arguments, train_dataset=data, callbacks=[QfuseCallback()])

This module imports transformers, and is imported only when somebody asks for what is in it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from inductor_q.exc import (
    MissingExtra,
    NormOfOneRank,
    NotATrainer,
    OptionsWithoutCompile,
    ReplicatedModel,
)
from inductor_q.experts.forward import is_sharded
from inductor_q.integrations.cpu_packing import keep_unpacked
from inductor_q.integrations.fp8 import prepare_unless_strict
from inductor_q.integrations.lengths import lengths_vary
from inductor_q.integrations.profile import StepProfile
from inductor_q.integrations.regions import Regions, check_regions, compile
from inductor_q.integrations.states import (
    asks_for_graphs,
    states_of,
    tell_of_graphs,
    without_graphs,
)
from inductor_q.integrations.walks import spare_walks, walk_again
from inductor_q.log import log, warn_once
from inductor_q.options import check_options
from inductor_q.process import report
from inductor_q.verdict import LOST

try:
    from tqdm import tqdm
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    if error.name not in ("transformers", "tqdm"):  # which transformers brings
        raise
    raise MissingExtra(
        package="transformers", extra="transformers", feature="QfuseCallback"
    ) from error


class QfuseCallback(TrainerCallback):
    """Compile the model of a Trainer with qfuse when training begins, and say what came of it.

    What is compiled, and what is prepared for it, is as of `inductor_q.compile`. After the first
    step one line says how many layers are fused, in how many graphs with how many breaks; at the
    end another one does where that has changed. Of two callbacks of one trainer the later one
    compiles, and says so. Importing `inductor_q.integrations` lets
    `TrainingArguments(torch_compile_backend="qfuse")` be said.

    CUDA graphs ("triton.cudagraphs") are for training: evaluation, which keeps its predictions,
    runs without them, and so does training where gradients add up over several batches.

    Args:
        options, mode, dynamic: as of `torch.compile(backend="qfuse")`; the mode may be the
            trainer's `torch_compile_mode`. Where the rows of the training data have different
            lengths, the first graph of a model that is compiled as a whole is for every length,
            unless `dynamic` is given: False where a collator pads all batches to one length.
        regions: as of `inductor_q.compile`.
        enabled: "auto" compiles where there is a GPU, and otherwise warns and ignores the options.
        profile: a folder for a Chrome trace, and on a GPU a memory snapshot, of `profile_steps`.

    Raises:
        OptionsWithoutCompile: there are options, and `enabled` is False.
        UnknownRegions: `regions` is none of the three.
        UnknownMode, UnknownOption, InvalidOptionValue and the like: as of
            `inductor_q.check_options`.
        NoProfileSteps: there is a folder for a profile, and no step to record.
        ReplicatedModel: when the trainer is made, where it would use nn.DataParallel.
        NormOfOneRank: at the start of training, where `experts.shard` has left experts to other
            ranks, and the trainer clips gradients.
    """

    def __init__(
        self,
        *,
        options: Mapping[str, Any] | None = None,
        mode: str | None = None,
        dynamic: bool | None = None,
        regions: Regions = "auto",
        enabled: bool | Literal["auto"] = True,
        profile: str | Path | None = None,
        profile_steps: Collection[int] = (4, 5),
    ) -> None:
        given = {"options": options, "mode": mode}
        if not enabled and (unused := [name for name, value in given.items() if value]):
            raise OptionsWithoutCompile(given=unused)
        if enabled == "auto":
            enabled = torch.cuda.is_available()
            if not enabled:
                log.warning("QfuseCallback: there is no GPU, so nothing is compiled")
        check_regions(regions)
        check_options(options, mode)
        self.enabled = enabled
        self.settings: dict[str, Any] = {**given, "dynamic": dynamic, "regions": regions}
        self.profile = StepProfile(Path(profile), profile_steps) if profile else None
        self._said = ""

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.enabled:
            if _is_replicated(args, kwargs["model"]):
                raise ReplicatedModel(gpus=args.n_gpu)
            keep_unpacked(kwargs["model"])
            prepare_unless_strict(kwargs["model"], self.settings["options"])
            _take_over(args)
            self._settings(args)  # a mode that there is not is an error now

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.max_grad_norm and is_sharded(kwargs["model"]):
            raise NormOfOneRank(value=args.max_grad_norm)
        self._said = ""
        if self.enabled:
            settings = self._settings(args)
            graphs = _graphs(args, settings, tells=state.is_world_process_zero)
            settings = without_graphs(settings) if graphs == "overwritten" else settings
            model = compile(kwargs["model"], **settings)
            spare_walks(model)
            data = getattr(kwargs.get("train_dataloader"), "dataset", None)
            for states in states_of(model):
                states.told_by = self
                states.keep_results(graphs == "on")
                states.lengths_vary = self.settings["dynamic"] is None and lengths_vary(data)

    def _settings(self, args: Any) -> dict[str, Any]:
        """Return the settings, with the trainer's `torch_compile_mode` where they have no mode."""
        mode = getattr(args, "torch_compile_mode", None)
        if not getattr(args, "torch_compile", False) or not mode:
            return self.settings
        own = self.settings["mode"] or (self.settings["options"] or {}).get("qfuse.mode")
        if own:
            if mode != own:
                warn_once(f"torch_compile_mode={mode!r} is ignored: QfuseCallback has a mode")
            return self.settings
        check_options(self.settings["options"], mode)
        return {**self.settings, "mode": mode}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.profile:
            self.profile.begin(state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.profile:
            self.profile.end(state.global_step)
        if not self._said:
            self._say(state, kwargs["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.profile:
            self.profile.end()
        walk_again(kwargs["model"])
        self._say(state, kwargs["model"])

    def _say(self, state: Any, model: nn.Module) -> None:
        """Print the line, where it is new, and no later callback does."""
        if not self.enabled:
            return
        if any(states.told_by is not self for states in states_of(model)):
            self._said = "by another callback"
            return
        now = report(model)
        line = now.summary()
        if line != self._said and state.is_world_process_zero:
            tqdm.write(line)  # above the progress bar, which may stand on the same terminal
            if now.layers and not now.fused_anywhere and LOST not in now.reasons():
                log.warning("qfuse: the model has quantized layers, and none is fused")
        self._said = line


class DefaultCallback(QfuseCallback):
    """What `qfuse run` gives to every trainer: a class of its own, since transformers warns of two
    callbacks of one class. It comes first, so one that the program gives wins."""


def compile_trainer(trainer: Any, **settings: Any) -> Any:
    """Give a trainer that exists already a `QfuseCallback` with these settings; return the trainer.

    Call it before `train()` and before the first evaluation.

    Raises:
        NotATrainer: `trainer` is something else.
    """
    if not hasattr(trainer, "add_callback"):
        raise NotATrainer(found=type(trainer).__name__)
    callback = QfuseCallback(**settings)
    callback.on_init_end(trainer.args, trainer.state, trainer.control, model=trainer.model)
    trainer.add_callback(callback)
    return trainer


def _is_replicated(args: Any, model: nn.Module) -> bool:
    """Whether a Trainer wraps the model in nn.DataParallel, as it does but for bitsandbytes'."""
    marks = ("is_loaded_in_8bit", "is_loaded_in_4bit")
    return args.n_gpu > 1 and not any(getattr(model, mark, False) for mark in marks)


def _graphs(
    args: Any, settings: Mapping[str, Any], *, tells: bool
) -> Literal["off", "on", "overwritten"]:
    """Say whether CUDA graphs are on, and would overwrite the gradients of the batch before.

    Warn of the latter where the user asked for graphs and this process `tells`; those of a preset
    are switched off silently.
    """
    source = asks_for_graphs(settings, args.device)
    if not source:
        return "off"
    if args.gradient_accumulation_steps == 1:
        return "on"
    if tells:
        why = (
            f"With gradient_accumulation_steps={args.gradient_accumulation_steps} a graph would "
            "overwrite the gradients of the batch before; it takes 1 to use them"
        )
        tell_of_graphs("QfuseCallback", source, why)
    return "overwritten"


def _take_over(args: Any) -> None:
    """Keep accelerate from compiling the model too, which would be whole and of another backend."""
    if not getattr(args, "torch_compile", False):
        return
    from accelerate.state import AcceleratorState
    from accelerate.utils import DynamoBackend

    AcceleratorState().dynamo_plugin.backend = DynamoBackend.NO
    if args.torch_compile_backend != "qfuse":
        backend = args.torch_compile_backend  # "inductor" where nobody has said one
        log.warning("torch_compile_backend=%r: QfuseCallback compiles, with qfuse instead", backend)
