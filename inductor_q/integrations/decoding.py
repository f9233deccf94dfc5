"""Compile the steps of one token that `generate` takes, and look at the model once a prompt.

Dynamo looks at every module before it calls a graph: a guard for each attribute that the trace has
read, tens of thousands of them in a model with adapters. One token for one sequence takes a GPU
less time than that takes the host. In a text a model does not change, so here guards on modules are
left out, and what they are about is looked at in front of each prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported

from inductor_q.integrations.cpu_packing import keep_unpacked
from inductor_q.integrations.fp8 import prepare_unless_strict
from inductor_q.integrations.regions import base_model
from inductor_q.integrations.states import State, States, named_function
from inductor_q.log import warn_once

_DEPTH = 3  # of objects that an attribute of a module holds in each other
_BOOKKEEPING = frozenset(vars(nn.Module()))  # hooks, parameters, buffers, modules, training
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def compile_decoding(
    model: nn.Module, *, options: Mapping[str, Any] | None = None, mode: str = "reduce-overhead"
) -> nn.Module:
    """Compile what `generate` calls for one token at a time, in place, and return the model.

    With a static cache (`cache_implementation="static"`, `disable_compile=True`) all steps have the
    same shapes, so one graph serves texts of any length: on a GPU in CUDA graphs. All else runs as
    before: the prompt, calls that need gradients or have no static cache, training of a model that
    `inductor_q.compile` was given (compile that first).

    In front of a text's first token, and where another adapter is active, each module's type,
    hooks and plain attributes, the shapes and dtypes of its parameters and their quant states are
    looked at: each state is compiled when it is first met. Between tokens Dynamo has no guards on
    modules, so a text's model must stay as it is up to its last token.

    Args:
        model: a causal language model of transformers, or PEFT's wrapper around one.
        options: as of `torch.compile(backend="qfuse")`.
        mode: as of torch.compile; "default" is without CUDA graphs.
    """
    module = base_model(model)
    keep_unpacked(model)
    prepare_unless_strict(model, options)
    settings = {"qfuse.mode": mode, "guard_filter_fn": _not_of_modules, **(options or {})}
    call = module._compiled_call_impl
    before = call.before if isinstance(call, Decoding) else call
    module._compiled_call_impl = Decoding(module, model, settings, before)
    return model


class Decoding:
    """Call a module compiled where it computes one token of a text, and as `before` otherwise."""

    def __init__(
        self,
        module: nn.Module,
        model: nn.Module,
        options: dict[str, Any],
        before: Callable[..., Any] | None,
    ) -> None:
        self.module: Any = module
        self.before = before
        self.states = States(model, {"options": options, "dynamic": False, "fullgraph": True})
        self.chosen: tuple[State, Callable[..., Any]] | None = None  # since the prompt

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _is_step(args, kwargs):
            self.chosen = None
            return (self.before or self.module._call_impl)(*args, **kwargs)
        state = self.states.state()
        if self.chosen is None or self.chosen[0] != state:
            self.states.enter(state)
            self.states.latest = state = self.states.state()
            key, name = (facts_of(self.module), state), type(self.module).__name__
            self.chosen = (state, self.states.compiled(key, lambda: named_function(name)))
        try:
            return self.chosen[1](self.module, *args, **kwargs)
        except Unsupported as error:
            # A part of a graph that breaks would be kept with code that other models have too.
            said = str(error).partition("\n")[0]
            warn_once(
                f"compile_decoding: a step of {type(self.module).__name__} is no whole graph, so "
                f"Dynamo keeps its guards on modules: {said}"
            )
            options = dict(self.states.settings["options"])
            options.pop("guard_filter_fn", None)
            self.states.settings = {"options": options, "dynamic": False}
            self.states.functions.clear()
            self.chosen = None
            return self(*args, **kwargs)


def _is_step(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is for one token behind those of a static cache, without gradients."""
    ids, cache = kwargs.get("input_ids"), kwargs.get("past_key_values")
    return (
        not args
        and isinstance(ids, Tensor)
        and ids.shape[1:] == (1,)
        and getattr(cache, "is_compileable", False)
        and not torch.is_grad_enabled()
    )


def _not_of_modules(entries: Sequence[Any]) -> list[bool]:
    return [not entry.orig_guard.source.is_unspecialized_nn_module() for entry in entries]


def facts_of(model: nn.Module) -> Hashable:
    """Gather what a graph may have taken from the modules of `model` as constant."""
    facts: list[Hashable] = []
    for name, module in model.named_modules():
        held = vars(module)
        plain = {key: value for key, value in held.items() if key not in _BOOKKEEPING}
        hooks = tuple(tuple(held[kind]) for kind in _HOOKS)
        tensors = _facts({**module._parameters, **module._buffers}, _DEPTH)
        facts.append((name, type(module), module.training, hooks, _facts(plain, _DEPTH), tensors))
    return tuple(facts)


def _facts(value: Any, depth: int) -> Any:
    """Describe a value: itself if it is plain, of a tensor its kind, of objects what they hold."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return value
    if isinstance(value, Tensor):
        # Dynamo writes notes of its own on tensors.
        held = {key: item for key, item in vars(value).items() if not key.startswith("_dynamo")}
        kind = (type(value), value.dtype, value.device, tuple(value.shape), value.requires_grad)
        return (*kind, _facts(held, depth - 1))
    if isinstance(value, nn.Module) or depth == 0:
        return type(value)  # a module is looked at by itself
    if isinstance(value, Mapping):
        return tuple((str(key), _facts(item, depth - 1)) for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return (type(value), *(_facts(item, depth - 1) for item in value))
    if callable(value) or not hasattr(value, "__dict__"):
        return (type(value), id(value))
    return (type(value), _facts(vars(value), depth - 1))
