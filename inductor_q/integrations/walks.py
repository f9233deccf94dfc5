"""Make walks over all modules cheap, which a trainer takes for each batch.

transformers' Trainer calls `model.train()`, which sets an attribute of every module, and
`model.num_parameters()`, to add up floating-point operations. A model with adapters has thousands
of modules. So a model that a trainer trains first reads whether all modules train already, and
counts its parameters once. The Trainer lists them twice more in each step, to clip their gradients
and to drop them (`parameters()`, `zero_grad()`). torch makes a name for each on the way, and hands
it through a generator of every module around it. A model of PEFT lists them without both.

Where TRL's trainers need a reference, they call PEFT's `model.disable_adapter()`. PEFT describes
every adapter first, with devices and gradients, to learn from that whether they are enabled. Here
this is all that is looked at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from inductor_q.integrations.methods import is_replaced, replace_method
from inductor_q.integrations.regions import base_model
from inductor_q.modules import modules_of

_STATUS = "get_model_status"

#: By model, then by the names of its adapters and whether embeddings are left out.
_counts: WeakKeyDictionary[nn.Module, dict[tuple[Any, bool], int]] = WeakKeyDictionary()


def spare_walks(model: nn.Module) -> None:
    """Let `model` look first whether there is anything to do; it trains from now on."""
    model.train()  # once as it is: a module's own `train` may leave a part in evaluation
    for module, name, method in _methods(model):
        if hasattr(type(module), name) and not is_replaced(module, name):
            replace_method(module, method)


def walk_again(model: nn.Module) -> None:
    """Give the model its own methods back."""
    for module, name, method in _methods(model):
        if getattr(vars(module).get(name), "__func__", None) is method:
            delattr(module, name)


def _methods(model: nn.Module) -> Iterator[tuple[nn.Module, str, Callable[..., Any]]]:
    """Yield each method, by its name, and the module that has it."""
    yield model, "train", train
    yield base_model(model), "num_parameters", num_parameters
    yield model, "disable_adapter", disable_adapter
    if _lists_as_modules_do(model):
        yield model, "parameters", parameters
        yield model, "zero_grad", zero_grad


def _lists_as_modules_do(model: nn.Module) -> bool:
    """Whether a model's class leaves these methods alone, and another model within computes. Of one
    that computes itself, transformers lists parameters while Dynamo traces its forward."""
    names = ("parameters", "zero_grad", "named_parameters", "named_modules")
    own = all(getattr(type(model), name) is getattr(nn.Module, name) for name in names)
    return own and model is not base_model(model)


def train(self: Any, mode: bool = True) -> Any:
    """Do what the method of the model's class does, unless all modules train already."""
    if mode is True and _all_train(self):
        return self
    return type(self).train(self, mode)


def _all_train(model: nn.Module) -> bool:
    waiting: list[nn.Module] = [model]
    while waiting:
        module = waiting.pop()
        if not module.training:
            return False
        waiting += [part for part in module._modules.values() if part is not None]
    return True


def num_parameters(
    self: Any, only_trainable: bool = False, exclude_embeddings: bool = False
) -> int:
    """Do what the method of the model's class does; it runs once for the same adapters, but for
    counts that depend on what requires a gradient."""
    found = _counts.setdefault(self, {})
    key = tuple(getattr(self, "peft_config", ())), exclude_embeddings
    if only_trainable or key not in found:
        count: int = type(self).num_parameters(self, only_trainable, exclude_embeddings)
        if only_trainable:
            return count
        found[key] = count
    return found[key]


def parameters(self: Any, recurse: bool = True) -> Iterator[nn.Parameter]:
    """Yield what the method of the model's class does, in its order."""
    if not recurse:
        yield from type(self).parameters(self, recurse=False)
        return
    met: set[int] = set()
    for module in modules_of(self):
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in met:
                met.add(id(parameter))
                yield parameter


def zero_grad(self: Any, set_to_none: bool = True) -> None:
    """Do what the method of the model's class does."""
    if not set_to_none or getattr(self, "_is_replica", False):
        type(self).zero_grad(self, set_to_none)
        return
    # Packed parameters are of a subclass, which Python would be asked for each gradient.
    with torch._C.DisableTorchFunctionSubclass():
        for parameter in parameters(self):
            if parameter.grad is not None:
                parameter.grad = None


@contextlib.contextmanager
def disable_adapter(self: Any) -> Iterator[Any]:
    """Do what the method of the model's class does, with a status in which only what is read is
    looked up."""
    with contextlib.ExitStack() as stack:
        is_users = _STATUS in vars(self)
        if not is_users:
            setattr(self, _STATUS, lambda: Status(self))
        try:
            found = stack.enter_context(type(self).disable_adapter(self))
        finally:
            if not is_users:
                delattr(self, _STATUS)
        yield found


class Status:
    """Answer for PEFT's `TunerModelStatus` of a model as it is now: whether adapters are enabled,
    and what else it has where it is asked for that.

    `enabled` is True, False, or "irregular" where adapters differ, as PEFT has it.
    """

    def __init__(self, model: Any) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper, TrainableTokensWrapper

        kinds, around_another = (BaseTunerLayer, AuxiliaryTrainingWrapper), TrainableTokensWrapper
        adapters: list[Any] = [m for m in modules_of(model.base_model) if isinstance(m, kinds)]
        found = {not a.disable_adapters for a in adapters if not isinstance(a, around_another)}
        self.model = model
        if not found:  # an error of PEFT's
            self.enabled = self.__getattr__("enabled")
        else:
            self.enabled = found.pop() if len(found) == 1 else "irregular"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of a copy that is being made
            raise AttributeError(name)
        return getattr(type(self.model).get_model_status(self.model), name)
