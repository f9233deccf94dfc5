"""Keep graphs apart by the state that a model and its adapters are in.

Dynamo keeps the graphs of one function in one list, for all models of a class, and gives up after
eight. Training, evaluation, a reference pass with the adapters off, a second adapter and another
length are a graph each. So each state gets a function of its own here, with room for eight graphs
that differ in what is no part of the state, such as shapes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch.nn.parallel import DistributedDataParallel

from inductor_q.backend import begins, qfuse_backend, reports
from inductor_q.capture.example import SPREAD
from inductor_q.compiled_for import compiling
from inductor_q.experts.forward import is_sharded
from inductor_q.inductor_config import GRAPHS, wants_graphs
from inductor_q.integrations.caches import caches_of, is_new
from inductor_q.integrations.captured_outputs import prepare_asked, prepare_router_logits
from inductor_q.integrations.checkpointing import has_llm_int8
from inductor_q.integrations.dora import prepare_dora
from inductor_q.integrations.lengths import mark_lengths
from inductor_q.integrations.mask_parts import MaskParts, parts_of, takes_parts, with_mask
from inductor_q.integrations.neftune import prepare_neftune
from inductor_q.integrations.parameters import prepare_parameters
from inductor_q.integrations.problem_type import Classifier
from inductor_q.log import warn_once
from inductor_q.modules import modules_of
from inductor_q.options import resolve
from inductor_q.resolved import Resolved

#: Names of the adapters, the active ones, whether they are off, the merged ones, whether PEFT calls
#: the model without them, training, gradients.
State = tuple[tuple[str, ...], Hashable, Hashable, Hashable, Hashable, bool, bool]

_NEVER = 1 << 62
_ACTIVE = "_active_adapter"  # what PEFT's layers keep the list of active adapters in


class States:
    """Hold the functions that are compiled for each state of `model`, with the same `settings`."""

    def __init__(self, model: nn.Module, settings: dict[str, Any]) -> None:
        self.model: Any = model
        begins(model)
        self.settings = settings
        self.functions: dict[tuple[Any, State], Callable[..., Any]] = {}
        self.latest: State | None = None
        self.is_sharded = is_sharded(model)
        # Of what forward notes in these, nobody reads what backward would note again.
        self.skips_effects = prepare_router_logits(model) or has_llm_int8(model)
        self.collects = False  # whether hooks that collect hidden states are there
        self.lengths_vary = False  # whether to tell Dynamo so before it finds out
        self.keeps_results = False  # of calls without gradients, where a CUDA graph overwrites them
        self.classifier: Classifier | None = None  # which is compiled with its loss
        self.told_by: Any = None  # the callback that says what came of it
        self.least_positions: int | None = None  # for a layer's mask to become its parts
        self.reads_masks = False  # whether a layer was given a mask that it cannot take as parts
        self.least_logits: int | None = None  # for the loss to be compiled beside layers
        self.applies: dict[str, bool] = {}  # whether passes do that layers or the loss are made for
        self.evaluates = False  # whether the call is one with labels, and no step of training
        self.layer: Any = None  # one of PEFT's layers, which has what is active

    def prepare_asked(self, given: Mapping[str, Any]) -> None:
        """Prepare the model for a call with these arguments, should it ask for hidden states."""
        self.collects = prepare_asked(self.model, given)
        self.skips_effects |= self.collects

    def function(self, part: nn.Module) -> Callable[..., Any]:
        """Return what calls `part` in the state that the model is in now.

        Hooks of a part stay outside of its graph, as torch has it in `module.compile()`: FSDP's
        cannot be traced. Dynamo's list of graphs is then that of the class.
        """
        state = self.follow()
        if part._forward_pre_hooks or part._forward_hooks:
            return self.compiled((part, state), lambda: part._call_impl, **_wide_limit())
        key: tuple[Any, State] = (type(part), state)
        name = type(part).__name__
        call = self.compiled(key, lambda: named_function(name), **_wide_limit())
        return functools.partial(call, part)

    def loss(self, model: Any, args: tuple[Any, ...], given: dict[str, Any], outputs: Any) -> Any:
        """Call the forward of `model` compiled, whose decoder has run and returned `outputs`."""
        if self.lengths_vary:
            mark_lengths({**given, "inputs_embeds": outputs[0]})
        key: tuple[Any, State] = (type(model), self.follow())
        name = f"{type(model).__name__}.loss"
        call = self.compiled(key, lambda: named_function(name))
        with self.calling(), self.watching("chunk_loss"):
            return call(model, *args, **given)

    @contextlib.contextmanager
    def evaluating(self, evaluates: bool) -> Iterator[None]:
        """Have layers know that they are called for a loss which nobody trains on."""
        before, self.evaluates = self.evaluates, evaluates
        try:
            yield
        finally:
            self.evaluates = before

    @contextlib.contextmanager
    def watching(self, name: str) -> Iterator[None]:
        """Note whether a pass is applied in the first graphs that are compiled for its sake."""
        if name in self.applies:
            yield
            return
        before = len(reports())
        yield
        if new := reports()[before:]:
            self.applies[name] = any(report.applied().get(name) for report in new)

    def chunks(self, model: Any, labels: Tensor) -> bool:
        """Whether `chunk_loss` would take the loss of these labels."""
        if not self.applies.get("chunk_loss", True):
            return False
        if self.least_logits is None:
            resolved = self.resolved(labels.device)
            on = "chunk_loss" in resolved.passes and resolved.loss != "whole"
            least = 0 if resolved.loss == "chunked" else resolved.threshold("chunk_loss.min_logits")
            self.least_logits = least if on else _NEVER
        vocabulary: int = getattr(model.config.get_text_config(), "vocab_size", 0)
        return labels.numel() * vocabulary >= self.least_logits

    def resolved(self, device: torch.device) -> Resolved:
        """Return the values that these settings have on a device."""
        return resolve(self.settings["mode"], self.settings["options"], device=device)

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Set what Dynamo needs to compile a part of the model in one graph."""
        needed: dict[str, bool] = {}
        if DistributedDataParallel._get_active_ddp_module() is not None:
            needed["optimize_ddp"] = False
        if self.is_sharded:
            needed["capture_dynamic_output_shape_ops"] = True
        if self.skips_effects:
            needed["skip_fwd_side_effects_in_bwd_under_checkpoint"] = True
        patched = dynamo_config.patch(needed) if needed else contextlib.nullcontext()
        with patched, compiling(self.model):
            yield

    def with_parts(self, layer: nn.Module, x: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Return what a layer is given beside `x`, with its mask as parts where its graph is to do
        without the mask."""
        mask = given.get("attention_mask")
        parts = parts_of(mask, x)
        if mask is None or parts is None or not takes_parts(layer):
            self.reads_masks |= mask is not None
            return given
        if not self.applies.get("causal_attention", True):
            return given  # else each layer would make a mask of its own
        least = self._least(mask.device)
        return {**given, "attention_mask": parts} if mask.shape[-1] >= least else given

    def unread_from(self, device: torch.device) -> int | None:
        """Return the number of positions from which on, as far as is known, no layer reads its
        mask; None where a layer does at any."""
        if self.reads_masks or not self.applies.get("causal_attention", True):
            return None
        return self._least(device)

    def _least(self, device: torch.device) -> int:
        """Return the number of positions from which on `causal_attention` replaces masks."""
        if self.least_positions is None:
            resolved = self.resolved(device)
            on = "causal_attention" in resolved.passes and resolved.numerics != "strict"
            least = resolved.threshold("causal_attention.min_positions")
            self.least_positions = least if on else _NEVER
        # As the pass has it: where lengths vary, other batches are longer.
        return self.least_positions // (SPREAD if self.lengths_vary else 1)

    def compiled(
        self, key: tuple[Any, State], make: Callable[[], Callable[..., Any]], **limits: Any
    ) -> Callable[..., Any]:
        if key not in self.functions:
            settings = {**self.settings, **limits}
            if self.keeps_results and not torch.is_grad_enabled():
                settings = without_graphs(settings)
            if settings.get("options"):  # torch takes what is Dynamo's out of it
                settings["options"] = dict(settings["options"])
            self.functions[key] = torch.compile(make(), backend=qfuse_backend(), **settings)
        return self.functions[key]

    def keep_results(self, keeps: bool) -> None:
        """Say whether results without gradients are kept, which changes what serves them."""
        if keeps != self.keeps_results:
            self.functions = {key: f for key, f in self.functions.items() if key[1][-1]}
        self.keeps_results = keeps

    def state(self) -> State:
        """Return what graphs depend on; what it leaves out, Dynamo's guards still look at."""
        layer = self.layer
        return (
            self.adapters(),
            tuple(layer.active_adapters) if layer is not None else (),
            layer is not None and layer.disable_adapters,
            tuple(layer.merged_adapters) if layer is not None else (),
            bool(getattr(self.model, "_adapters_disabled", False)),
            self.model.training,
            torch.is_grad_enabled(),
        )

    def adapters(self) -> tuple[str, ...]:
        return tuple(getattr(self.model, "peft_config", ()))

    def follow(self) -> State:
        """Return the state that the model is in, and enter it if it was in another one."""
        state = self.state()
        if state != self.latest:
            self.enter(state)
            self.latest = state = self.state()
        return state

    def enter(self, state: State) -> None:
        """Make the model look as it did when it was in this state before.

        PEFT gives one list of active adapters to all layers, or each its own, depending on what was
        called. Dynamo guards on which it is, so layers with equal lists share one. States of
        adapters that were deleted are dropped, and their graphs with them. New adapters of DoRA and
        of parameters are prepared for one graph, and NEFTune's hooks, which come and go with
        training.
        """
        modules = modules_of(self.model)
        prepare_neftune(module for module in modules if module._forward_hooks)
        if self.latest is None or state[0] != self.latest[0]:
            prepare_dora(self.model)
            prepare_parameters(self.model)
            # Not a wrapper of modules_to_save, which never merges and has the name in its class.
            layers = (m for m in modules if "merged_adapters" in vars(m))
            self.layer = next(layers, None)
            there = set(self.adapters())
            self.functions = {
                key: function for key, function in self.functions.items() if there >= set(key[1][0])
            }
        lists: dict[tuple[str, ...], list[str]] = {}
        for module in modules:
            names = vars(module).get(_ACTIVE)
            if isinstance(names, list):
                setattr(module, _ACTIVE, lists.setdefault(tuple(names), names))


@dataclass(frozen=True, eq=False)
class Region:
    """Call a module compiled for its state, unless keys and values are cached, or it is inside of a
    function that somebody else compiles.

    A model of transformers whose configuration has `use_cache` makes an empty cache in each forward
    and gives it to its layers. Where they train they get none, as under gradient checkpointing.

    Under DDP torch would split the graph where a bucket of gradients is full, to overlap their
    all-reduce with the rest of backward. Adapters' gradients are small, and a part without the
    embeddings or the mask has less that can be fused, so the graph stays whole here. How many
    tokens come from other ranks to the experts of this one is no number that a graph knows; it
    stays whole there too.
    """

    module: Any
    states: States
    shares: bool = False  # its graph with layers like it: it is a layer of the model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        caches = caches_of(kwargs)
        if torch.compiler.is_compiling() or not all(map(self._leaves_out, caches.values())):
            return self.module._call_impl(*args, **kwargs)
        kwargs.update(dict.fromkeys(caches))
        if not self.shares and not self.states.collects:
            self.states.prepare_asked(kwargs)
        if self.states.lengths_vary:
            mark_lengths(kwargs)
        if self.states.classifier is not None:
            self.states.classifier.write_problem_type(args, kwargs)
        if args and self.shares:
            kwargs = self.states.with_parts(self.module, args[0], kwargs)
            if torch.is_grad_enabled():
                args = (_like_the_others(args[0], self.module), *args[1:])
        call = self.states.function(self.module)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.states.calling())
            if isinstance(kwargs.get("attention_mask"), MaskParts):
                stack.enter_context(self.states.watching("causal_attention"))
            return call(*args, **kwargs)

    def _leaves_out(self, cache: Any) -> bool:
        """Whether this is a layer that trains, and does without a cache; say once what follows."""
        if not (self.shares and self.module.training and torch.is_grad_enabled()):
            if self.shares and self.states.evaluates and is_new(cache):
                warn_once(
                    "inductor_q.compile: an evaluation by layers that makes a cache of keys and "
                    "values runs them in eager mode. use_cache=False has them compiled"
                )
            return False
        if not is_new(cache):
            warn_once(
                "inductor_q.compile: layers run in eager mode in a training step that reads keys "
                "and values of tokens before it (a cache)"
            )
            return False
        warn_once(
            "inductor_q.compile: layers that train keep no keys and values, so the cache that a "
            "step returns is empty. model.config.use_cache = False leaves it out altogether"
        )
        return True


def asks_for_graphs(settings: Mapping[str, Any], device: torch.device) -> str:
    """Return who asks for CUDA graphs in training by these settings; "" where nobody does."""
    with torch.enable_grad():
        resolved = resolve(settings["mode"], settings["options"], device=device)
    if not wants_graphs(resolved.inductor):
        return ""
    return resolved.sources.get(GRAPHS, "torch's own configuration")


def tell_of_graphs(caller: str, source: str, why: str) -> None:
    """Warn once that CUDA graphs stay off, unless it is a preset that asks for them."""
    if not source.startswith("preset"):
        warn_once(f"{caller}: CUDA graphs ({GRAPHS}: {source}) stay off. {why}")


def without_graphs(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings of torch.compile with CUDA graphs off, whatever asks for them."""
    options = {name: value for name, value in (settings["options"] or {}).items() if name != GRAPHS}
    options[GRAPHS] = False  # the last word, also over a nested one
    if mode := settings.get("mode"):  # torch takes no mode beside options
        options["qfuse.mode"] = mode
    return {**settings, "options": options, "mode": None}


def states_of(model: nn.Module) -> Iterator[States]:
    """Yield what holds the functions of `model` and of its parts, once for each part."""
    for part in model.modules():
        if region := region_of(part):
            yield region.states


def region_of(module: nn.Module) -> Region | None:
    """Return what calls a module compiled, also where its decoding is compiled apart."""
    call = called_by(module)
    return call if isinstance(call, Region) else None


def called_by(module: nn.Module) -> Any:
    """Return what takes the calls of a module in its place, decoding aside; None if nothing."""
    call = module._compiled_call_impl
    return getattr(call, "before", call)


def set_region(module: nn.Module, region: Callable[..., Any] | None) -> None:
    call: Any = module._compiled_call_impl
    if hasattr(call, "before"):
        call.before = region
    else:
        module._compiled_call_impl = region


def _like_the_others(x: Any, layer: nn.Module) -> Any:
    """Return what the first layer that trains is given as the layers behind it get it: requiring a
    gradient.

    So they share a graph, where the first one would have another. In return, backward computes one
    gradient that nobody reads. A layer in which nothing trains stays as it is, so that no backward
    runs there.
    """
    if not isinstance(x, torch.Tensor) or x.requires_grad or not x.is_floating_point():
        return x
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return x  # torch.func allows no change of what requires a gradient
    if not any(parameter.requires_grad for parameter in layer.parameters()):
        return x
    return x.detach().requires_grad_()


def state_codes(model: nn.Module) -> Iterator[CodeType]:
    """Yield the code by which Dynamo keeps the graphs of each state, in `model` and its parts."""
    from torch._dynamo.eval_frame import innermost_fn

    for states in states_of(model):
        yield from (innermost_fn(call).__code__ for call in states.functions.values())


def _call(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return part._call_impl(*args, **with_mask(args, kwargs))


def named_function(name: str) -> Callable[..., Any]:
    """Copy a function that calls a module, so that it has a code object of its own, by which Dynamo
    keeps its graphs."""
    return FunctionType(_call.__code__.replace(co_name=name), _call.__globals__, name)


@functools.cache
def _wide_limit() -> dict[str, int]:
    """Let more graphs of one function be taken, where `torch.compile` can be told (2.13)."""
    known = inspect.signature(torch.compile).parameters
    return {"recompile_limit": 16} if "recompile_limit" in known else {}
