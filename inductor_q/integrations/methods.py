"""Replace a method of one module, and of no class.

A bound method is pickled by its name. So a module that `torch.save` has written whole comes back
with the method of its class, needs nothing of ours to be read, and can be prepared again.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

#: Methods that a trainer calls between forwards and no forward calls, which its model may have
#: replaced (inductor_q.integrations.walks).
BETWEEN_FORWARDS = ("train", "num_parameters", "disable_adapter", "parameters", "zero_grad")


def is_replaced(module: nn.Module, name: str) -> bool:
    """Whether `module` calls something else by this name than its class does."""
    held: Any = vars(module).get(name)
    return held is not None and getattr(held, "__func__", None) is not getattr(type(module), name)


def name_of_forward(module: nn.Module) -> str:
    """Return the attribute that holds a module's forward; accelerate may have hooks around it."""
    return "_old_forward" if "_old_forward" in vars(module) else "forward"


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module computes what its class does, and nobody has replaced that."""
    held: Any = getattr(module, name_of_forward(module))
    return getattr(held, "__func__", None) is type(module).forward


def is_hooked(module: nn.Module) -> bool:
    """Whether something happens around the forward of a module, or around its backward."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    return bool(before or after or module._backward_hooks or module._backward_pre_hooks)


def replace_method(module: nn.Module, function: Callable[..., Any]) -> None:
    """Let `module` call `function` for the method that has its name."""
    setattr(module, function.__name__, MethodType(function, module))
