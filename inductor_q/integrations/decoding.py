"""Compile the steps of one token that `generate` takes, and look at the model once a text.

Dynamo looks at every module before it calls a graph: a guard for each attribute that the trace has
read, tens of thousands of them in a model with adapters. One token for one sequence takes a GPU
less time than that takes the host. In a text a model does not change, so here guards on modules are
left out, and what they would check is checked in front of each text's first step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported

from inductor_q.integrations.caches import cache_of
from inductor_q.integrations.cpu_packing import keep_unpacked
from inductor_q.integrations.facts import facts_of
from inductor_q.integrations.fp8 import prepare_unless_strict
from inductor_q.integrations.regions import base_model, check_module
from inductor_q.integrations.states import State, States, named_function
from inductor_q.log import warn_once
from inductor_q.options import check_options

_KEPT = 16  # compiled functions, of states, kinds of model, batch sizes and lengths of the cache


def compile_decoding(
    model: nn.Module, *, options: Mapping[str, Any] | None = None, mode: str = "reduce-overhead"
) -> nn.Module:
    """Compile what `generate` calls for one token at a time, in place, and return the model.

    With a static cache (`cache_implementation="static"`, `disable_compile=True`) all steps have the
    same shapes, so one graph serves all texts of a batch size and a length of the cache, on a GPU
    in CUDA graphs. The rest runs as it did: the prompt, calls that need gradients or have no static
    cache, and training of a model that `inductor_q.compile` was given. So do models whose cache has
    sliding windows, since transformers counts their tokens in Python, and steps that return hidden
    states or attentions, which the next replay would overwrite.

    In front of a text's first step, and where another adapter is active, the model is looked at:
    types of modules, hooks, attributes, which parameters are the same, their shapes, strides and
    dtypes, quant states. Each kind is compiled when it is first met. Between tokens Dynamo has no
    guards on modules, so a text's model must stay as it is up to its last token. A text begins with
    a prompt through the model, or with another cache.

    Args:
        model: a causal language model of transformers, or PEFT's wrapper around one.
        options: as of `torch.compile(backend="qfuse")`.
        mode: as of torch.compile; "default" is without CUDA graphs.

    Raises:
        NotAModule: `model` is something else.
        UnknownMode, UnknownOption, InvalidOptionValue and the like: as of
            `inductor_q.check_options`.
    """
    check_module(model, "compile_decoding")
    check_options({"qfuse.mode": mode, **(options or {})})
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
        self.chosen: dict[State, Callable[..., Any]] = {}  # of this text
        self.cache: Callable[[], Any] = lambda: None  # a weak reference to this text's
        self.buffers: list[dict[str, Tensor]] = []  # what that cache holds, layer by layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not self.is_step(args, kwargs):
            self.chosen = {}
            return (self.before or self.module._call_impl)(*args, **kwargs)
        cache = cache_of(kwargs)
        if self.cache() is not cache:
            self.chosen = {}
            self.adopt(cache)
        state = self.states.state()
        if state not in self.chosen:
            self.choose(state, kwargs["input_ids"].shape[0], cache)
            state = self.states.state()
        try:
            return self.chosen[state](self.module, *args, **kwargs)
        except (Unsupported, FailOnRecompileLimitHit) as error:
            self.take_guards(error)
            return self(*args, **kwargs)

    def is_step(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call is for one token behind those of a static cache, without gradients."""
        ids, cache = kwargs.get("input_ids"), cache_of(kwargs)
        if args or cache is None or not isinstance(ids, Tensor) or ids.shape[1:] != (1,):
            return False
        config, name = self.module.config, type(self.module).__name__
        kept = ("output_hidden_states", "output_attentions")
        if torch.is_grad_enabled() or any(kwargs.get(k, getattr(config, k, False)) for k in kept):
            return False
        if self.chosen and self.cache() is cache:
            return True  # as at the step before
        if not getattr(cache, "is_initialized", True):
            return False
        if not getattr(cache, "is_compileable", False):
            warn_once(
                f"compile_decoding: {name} is called with a {type(cache).__name__}, which is not "
                'static, so nothing is compiled: give generate cache_implementation="static"'
            )
            return False
        if any(getattr(cache, "is_sliding", ())):
            warn_once(
                f"compile_decoding: the cache of {name} has sliding windows, of which transformers "
                "counts the tokens in Python: a graph would serve one token alone, so none is made"
            )
            return False
        return True

    def choose(self, state: State, batch: int, cache: Any) -> None:
        """Take the function of what the model is now, or make one."""
        self.states.enter(state)
        self.states.latest = state = self.states.state()
        kind = (facts_of(self.module), batch, getattr(cache, "max_cache_len", None))
        functions, name = self.states.functions, type(self.module).__name__
        call = self.states.compiled((kind, state), lambda: named_function(name))
        functions[kind, state] = functions.pop((kind, state))  # the latest is the last
        for old in list(functions)[:-_KEPT]:
            del functions[old]
        self.chosen[state] = call

    def adopt(self, cache: Any) -> None:
        """Let a text's cache lie where the one before it did, if nobody has that cache any more.

        A CUDA graph holds addresses, so for a cache elsewhere it would be recorded again.
        """
        layers = getattr(cache, "layers", ())
        found = [_tensors(layer) for layer in layers]
        is_free = self.cache() is None and len(found) == len(self.buffers)
        if is_free and all(map(_alike, found, self.buffers)):
            for layer, mine, theirs in zip(layers, self.buffers, found, strict=True):
                for key, tensor in theirs.items():
                    setattr(layer, key, mine[key].copy_(tensor))
        else:
            self.buffers = found
        self.cache = weakref.ref(cache)

    def take_guards(self, error: Exception) -> None:
        """Go on with Dynamo's guards, in as many graphs as it takes.

        Parts of a graph would be kept with code that other models have too.
        """
        said = str(error).partition("\n")[0]
        warn_once(
            f"compile_decoding: a step of {type(self.module).__name__} is not one graph for many "
            f"tokens, so Dynamo keeps its guards on modules: {said}"
        )
        if "fullgraph" not in self.states.settings:
            raise error
        options = dict(self.states.settings["options"])
        options.pop("guard_filter_fn", None)
        self.states.settings = {"options": options, "dynamic": False}
        self.states.functions.clear()
        self.chosen = {}


def _tensors(layer: Any) -> dict[str, Tensor]:
    return {key: value for key, value in vars(layer).items() if isinstance(value, Tensor)}


def _alike(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    def kind(x: Tensor) -> tuple[Any, ...]:
        return (x.shape, x.stride(), x.dtype, x.device, x.is_inference())

    return one.keys() == other.keys() and all(kind(x) == kind(other[key]) for key, x in one.items())


def _not_of_modules(entries: Sequence[Any]) -> list[bool]:
    return [not entry.orig_guard.source.is_unspecialized_nn_module() for entry in entries]
