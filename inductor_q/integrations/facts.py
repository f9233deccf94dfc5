"""Describe what a graph may have taken from a model's modules as constant, to compare it later."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from inductor_q.integrations.methods import BETWEEN_FORWARDS

_DEPTH = 8  # of objects that an attribute of a module holds in each other
_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type)
_CONTAINERS = (list, tuple, set, frozenset, Mapping)
#: Hooks, parameters, buffers, modules, whether it trains; what is compiled for it; and methods that
#: no forward calls.
_BOOKKEEPING = frozenset({*vars(nn.Module()), "_compiled_call_impl", *BETWEEN_FORWARDS})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
#: What transformers notes on a model for `generate`, which no forward reads.
_OF_GENERATE = frozenset({"generation_config", "_previous_max_cache_length", "_cache"})
_LEFT_OUT = _BOOKKEEPING | _OF_GENERATE


def facts_of(model: nn.Module) -> Hashable:
    """Describe modules: types, hooks, attributes, and of tensors the kind but not the values.

    Objects are described by what they hold, a function by itself. One that occurs again, such as a
    tied weight, is told by where it was first.
    """
    look = _Look()
    facts: list[Hashable] = []
    for name, module in model.named_modules():
        left_out = _LEFT_OUT if module is model else _BOOKKEEPING
        parts: list[Any] = [v for kind in _HOOKS for v in (None, *vars(module)[kind].values())]
        parts += [module.training, *module._parameters.values(), *module._buffers.values()]
        held = {key: value for key, value in vars(module).items() if key not in left_out}
        facts.append((name, type(module), *look.all(parts, _DEPTH), look.items(held, _DEPTH)))
    return tuple(facts)


class _Look:
    """Describes values, and remembers which objects it has met."""

    def __init__(self) -> None:
        self.met: dict[int, int] = {}

    def all(self, values: Iterable[Any], depth: int) -> tuple[Any, ...]:
        return tuple(v if type(v) in _PLAIN else self.at(v, depth) for v in values)

    def items(self, held: Mapping[Any, Any], depth: int) -> tuple[Any, ...]:
        return (*map(str, held), *self.all(held.values(), depth))

    def at(self, value: Any, depth: int) -> Any:
        if type(value) in _PLAIN:
            return value
        if isinstance(value, nn.Module):  # looked at by itself
            return (type(value), self.met.setdefault(id(value), len(self.met)))
        if isinstance(value, _FUNCTIONS):
            return value  # itself, so that its place in memory is not another one's later
        if depth <= 0:
            return type(value)
        if isinstance(value, Mapping):
            return (type(value), self.items(value, depth - 1))
        if isinstance(value, _CONTAINERS):
            return (type(value), self.all(value, depth - 1))
        if isinstance(value, MethodType):
            return (value.__func__, self.at(value.__self__, depth - 1))
        if id(value) in self.met:
            return (type(value), self.met[id(value)])
        self.met[id(value)] = len(self.met)
        return (type(value), *self.inside(value, depth - 1))

    def inside(self, value: Any, depth: int) -> tuple[Any, ...]:
        if isinstance(value, Tensor):
            strides = value.stride() if value.layout is torch.strided else None
            # Dynamo writes notes of its own on tensors.
            notes = {k: v for k, v in vars(value).items() if not k.startswith("_dynamo")}
            kind = (value.dtype, value.device, value.shape, value.requires_grad, strides)
            return (*kind, self.items(notes, depth))
        if isinstance(value, functools.partial):
            return self.all((value.func, value.args, value.keywords), depth)
        slots = (name for kind in type(value).__mro__ for name in _slots(kind))
        held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        held |= getattr(value, "__dict__", {})
        return (self.items(held, depth) if held else id(value),)


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if not name.startswith("__"))
