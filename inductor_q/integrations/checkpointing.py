"""Checkpoint a transformers model without the hooks that break the graph.

Reentrant checkpointing gives a segment no gradients unless an input of it requires one. So
transformers and PEFT register a hook that calls `requires_grad_()` on the embeddings' output, which
Dynamo cannot trace. Checkpointing that is not reentrant, the only kind that torch.compile traces
whatever was asked for, needs no such hook: the adapters inside the segment are enough.

Experts that `replace_parameter_4bit` has packed have hooks which keep a decoded weight while their
module runs, in dictionaries of torch that no segment may change. A graph needs them no more: there
a weight that is read twice is one node.

A layer of LLM.int8 notes in each forward whether it trains and where its codes are. Eager
checkpointing does that again in backward, and Dynamo, which cannot, traces such a segment only
where `skip_fwd_side_effects_in_bwd_under_checkpoint` says that nobody needs it again.

transformers' `activation_checkpointing_enable(offload=True)` moves what a segment keeps to the host
by hooks on saved tensors, which Dynamo cannot trace. In a graph it stays on the device.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from inductor_q.capture.caching import caching_hooks
from inductor_q.integrations.methods import is_replaced, replace_method
from inductor_q.log import warn_once
from inductor_q.modules import modules_of

# Local functions of transformers, and of PEFT for models that are not transformers'.
_HOOKS = frozenset({"make_inputs_require_grads", "make_inputs_require_grad"})

# The methods of transformers' PreTrainedModel through which every way of enabling comes.
_ENABLING = ("enable_input_require_grads", "_set_gradient_checkpointing")

_FUNCTION = "_gradient_checkpointing_func"

# What transformers (5.23) calls where `offload=True`, around torch's function.
_OFFLOADS = "_activation_checkpointing_enable.<locals>.checkpoint_func"


def prepare_checkpointing(model: nn.Module) -> None:
    """Keep gradient checkpointing of `model` in one graph, however and whenever it is enabled.

    The hook that makes the embeddings' output require gradients is removed, checkpointing is made
    non-reentrant, which gives the same gradients; the hooks that keep decoded weights of packed
    experts, and offloading (`offload=True`), run in eager mode alone. All of it is done now, and
    again each time that somebody enables checkpointing or the hook on this model: a Trainer does so
    inside `train()`. For that, two methods of the model's own instance are wrapped; no class is
    changed. Models in eager mode work as before.

    Args:
        model: a transformers model, PEFT's wrapper around one, or a trainer's `model`.
    """
    for part in model.modules():
        for name in _ENABLING:
            method = getattr(type(part), name, None)
            if method is not None and not is_replaced(part, name):  # not twice
                replace_method(part, _then_prepare(method))
    _prepare(model)


def input_hooks(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield path, module and id of each hook that makes a module's output require gradients."""
    for path, module in model.named_modules():
        for key, hook in list(module._forward_hooks.items()):
            if _makes_input_require_grads(hook):
                yield path, module, key


def _makes_input_require_grads(hook: Any) -> bool:
    return getattr(hook, "__name__", "") in _HOOKS


def has_llm_int8(model: nn.Module) -> bool:
    """Whether `model` has layers of LLM.int8, whose forward changes the layer."""
    kind = getattr(sys.modules.get("bitsandbytes.nn"), "Linear8bitLt", ())
    return any(isinstance(module, kind) for module in model.modules())


def _in_eager_mode(hook: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(hook)
    def call(*args: Any) -> None:
        if not torch.compiler.is_compiling():
            hook(*args)

    return call


def _is_reentrant(layer: nn.Module) -> bool:
    """Whether a layer of transformers checkpoints reentrantly, as torch does where nobody says."""
    return bool(_keywords(getattr(layer, _FUNCTION, None)).get("use_reentrant", True))


def _keywords(function: Any) -> dict[str, Any]:
    return function.keywords if isinstance(function, functools.partial) else {}


def _offloads(function: Any) -> bool:
    """Whether a function that checkpoints also offloads, and is not traced without that yet."""
    called = getattr(function, "func", None)
    return str(getattr(called, "__qualname__", "")).endswith(_OFFLOADS) and not hasattr(
        called, "__wrapped__"
    )


def _offloading_in_eager_mode(function: functools.partial[Any]) -> functools.partial[Any]:
    offloading = function.func

    @functools.wraps(offloading)
    def call(*args: Any, **kwargs: Any) -> Any:
        run = checkpoint if torch.compiler.is_compiling() else offloading
        return run(*args, **kwargs)

    return functools.partial(call, *function.args, **function.keywords)


def _then_prepare(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        if kwargs.get("enable", True):  # and not off, as TRL has it around each reference pass
            _prepare(self)
        return result

    return call


def _prepare(model: nn.Module) -> None:
    """Mend what is enabled now: input hooks, hooks of packed experts, reentrant checkpointing and
    offloading.

    TRL's trainers with a reference pass enable checkpointing again in each step, so a module
    without hooks and without checkpointing is only passed by.
    """
    modules = modules_of(model)
    hooked = [m for m in modules if m._forward_hooks or m._forward_pre_hooks]
    if any(_makes_input_require_grads(hook) for m in hooked for hook in m._forward_hooks.values()):
        _remove_input_hooks(model)
    for module in hooked:
        for hooks, key in caching_hooks(module):
            if not hasattr(hooks[key], "__wrapped__"):
                hooks[key] = _in_eager_mode(hooks[key])
    reentrant = [m for m in modules if _FUNCTION in vars(m) and _is_reentrant(m)]
    for layer in reentrant:
        function: Any = getattr(layer, _FUNCTION)
        setattr(layer, _FUNCTION, functools.partial(function, use_reentrant=False))
    offloading = [m for m in modules if _offloads(vars(m).get(_FUNCTION))]
    for layer in offloading:
        setattr(layer, _FUNCTION, _offloading_in_eager_mode(getattr(layer, _FUNCTION)))
    if offloading:
        warn_once(
            "prepare_checkpointing: offload=True is for eager mode alone. In a graph, what a "
            "checkpointed layer keeps stays on the device; the options qfuse.memory and "
            "qfuse.offload keep a step within a budget"
        )
    if reentrant:
        warn_once(
            f"prepare_checkpointing: {len(reentrant)} modules checkpoint without reentrance now, "
            "since a reentrant checkpoint breaks the graph"
        )


def _remove_input_hooks(model: nn.Module) -> None:
    for path, module, key in input_hooks(model):
        del module._forward_hooks[key]
        warn_once(
            f"prepare_checkpointing: removed the input hook of {path!r}: it breaks the graph, and "
            "a checkpoint without reentrance needs none"
        )
