"""Spare a trainer two walks over all modules in every step.

transformers' Trainer calls `model.train()` for each batch, and `model.num_parameters()` to add up
floating-point operations. Each is a loop in Python over all modules, of which a model with adapters
has thousands, and where steps are short a GPU waits for it. While a trainer trains, the model finds
these two here, which do the same and look first whether there is anything to do.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_METHODS = ("train", "num_parameters")


class _Walk:
    """Stand in for a method of `model`; what was found holds for the adapters that it has."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.adapters: tuple[str, ...] | None = None

    def has_changed(self) -> bool:
        """Whether adapters came or went since the last call, and with them modules."""
        before, self.adapters = self.adapters, tuple(getattr(self.model, "peft_config", ()))
        return self.adapters != before


class Train(_Walk):
    """Do what `model.train(mode)` does, unless all modules train already."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.modules: list[nn.Module] = []

    def __call__(self, mode: bool = True) -> Any:
        if self.has_changed():
            self.modules = list(self.model.modules())
        if mode is True and all(module.training for module in self.modules):
            return self.model
        return type(self.model).train(self.model, mode)


class NumParameters(_Walk):
    """Do what `model.num_parameters(...)` does, and keep counts that are of all parameters."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.count: Any = model.num_parameters
        self.found: dict[bool, int] = {}

    def __call__(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        if only_trainable:
            return int(self.count(only_trainable=True, exclude_embeddings=exclude_embeddings))
        if self.has_changed():
            self.found.clear()
        if exclude_embeddings not in self.found:
            self.found[exclude_embeddings] = self.count(exclude_embeddings=exclude_embeddings)
        return self.found[exclude_embeddings]


def spare_walks(model: nn.Module) -> None:
    """Put both in the place of the model's own methods, unless an instance has its own already."""
    if "train" not in vars(model):
        vars(model)["train"] = Train(model)
    if hasattr(model, "num_parameters") and "num_parameters" not in vars(model):
        vars(model)["num_parameters"] = NumParameters(model)


def walk_again(model: nn.Module) -> None:
    """Give the model its own methods back."""
    for name in _METHODS:
        if isinstance(vars(model).get(name), _Walk):
            del vars(model)[name]
