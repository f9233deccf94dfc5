"""Write into a classifier's configuration, before its call is traced, what its first step would.

A classifier of transformers takes its loss by `config.problem_type`. Where that is None, the first
forward with labels writes there what their number and dtype say. Dynamo guards on it, so the second
step would be compiled again.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

_NAME = "problem_type"


@dataclass(frozen=True, eq=False)
class Classifier:
    """Hold a classifier of transformers whose forward may write `problem_type`."""

    model: Any
    place: int  # of the labels, where they are given without their name

    def write_problem_type(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Write what a forward with these arguments would, by the same rule."""
        config = self.model.config
        if getattr(config, _NAME) is not None:
            return
        labels = args[self.place] if len(args) > self.place else kwargs.get("labels")
        count = config.num_labels
        # Some models go by a number of their own, which may have been changed since.
        if not isinstance(labels, Tensor) or getattr(self.model, "num_labels", count) != count:
            return
        if count == 1:
            config.problem_type = "regression"
        elif count > 1 and labels.dtype in (torch.long, torch.int):
            config.problem_type = "single_label_classification"
        else:
            config.problem_type = "multi_label_classification"


def classifier_of(model: nn.Module, base: Any) -> Classifier | None:
    """Return the classifier that `base`, the model inside of PEFT's `model`, is; None where it is
    none, or has another rule."""
    if not writes_problem_type(base):
        return None
    names = [*inspect.signature(type(model).forward).parameters][1:]
    return Classifier(base, names.index("labels") if "labels" in names else sys.maxsize)


def writes_problem_type(base: Any) -> bool:
    """Whether the forward of a model is of transformers and writes `problem_type`, by itself or by
    the loss function that it calls. DeBERTa's, which only reads it, does neither."""
    for kind in type(base).__mro__:
        if "forward" not in vars(kind):
            continue
        forward = inspect.unwrap(vars(kind)["forward"])
        if not isinstance(forward, FunctionType) or not _is_of_transformers(forward):
            return False
        code = forward.__code__
        if "loss_function" in code.co_names:
            losses: Any = sys.modules.get("transformers.loss.loss_utils")
            wanted = getattr(losses, "ForSequenceClassificationLoss", None)
            return wanted is not None and base.loss_function is wanted
        if any(s.opname == "STORE_ATTR" and s.argval == _NAME for s in dis.get_instructions(code)):
            return True
        if "__class__" not in code.co_freevars:  # which `super()` needs
            return False
    return False


def _is_of_transformers(function: FunctionType) -> bool:
    return function.__module__.partition(".")[0] == "transformers"
