"""Logits that are computed when they are read.

A model returns its logits beside its loss, and a trainer drops them. A compiled graph that computes
the loss in chunks returns what they are made of, and this module makes a tensor of that: it has
their shape, dtype and device, and whatever else is asked of it is asked of their product, which is
computed at the first such question, gradients included. By then the weights of the head have to be
what they were: logits that are first read behind an optimizer's step raise `UnreadableLogits`.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from inductor_q.exc import UnreadableLogits
from inductor_q.log import warn_once

_READ = (
    "logits were read that the loss did not keep, and computed a second time: where they are read "
    "in every step, options={'qfuse.loss': 'whole'} keeps them"
)

_CHANGED = "the head was changed, by an optimizer's step perhaps, before these logits were read"

_GONE = "FSDP has freed the weights of the head, which these logits are made of, behind forward"

_OVERWRITTEN = "the hidden states were written to before the logits made of them were read"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the output at `place` is made of, by the outputs and nodes of Dynamo's graph."""

    place: int
    inputs: tuple[int, ...]  # of the outputs
    weights: tuple[fx.Node, ...]  # inputs of the graph, or its attributes
    scales: tuple[float, ...]
    bias: fx.Node | None
    computed: torch.dtype  # of the product
    dtype: torch.dtype  # of the output


_WRITTEN = "they were written to under torch.no_grad(), and are read with gradients"


class _State:
    """What a weight of the head was when its logits were made.

    Optimizers change weights behind torch's back: fused ones and those of bitsandbytes leave the
    version of a tensor as it is. So the numbers at some places of a trained weight are kept too;
    its gradient is dense, and a step changes them. Comparing them waits for the device.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.version = weight, _version(weight)
        self.is_plain = type(weight) in (Tensor, torch.nn.Parameter)
        kept = self.is_plain and weight.requires_grad
        self.numbers = _some(weight).clone() if kept else None

    def is_gone(self) -> bool:
        """Whether the weight has no memory any more, as one that FSDP has gathered for a while."""
        weight = self.weight
        return self.is_plain and weight.numel() > 0 and not weight.untyped_storage().size()

    def has_changed(self) -> bool:
        if _version(self.weight) != self.version:
            return True
        return self.numbers is not None and not torch.equal(_some(self.weight), self.numbers)


def _version(weight: Tensor) -> int:
    return 0 if weight.is_inference() else weight._version


def _some(weight: Tensor) -> Tensor:
    """Return a view of numbers from all over a weight, about 32 along each dimension."""
    return weight.detach()[tuple(slice(None, None, -(-size // 32)) for size in weight.shape)]


class Logits(Tensor):
    """`sum_i scales[i] * inputs[i] @ weights[i].T + bias`, computed when it is read."""

    _product: Callable[[], Tensor]
    _trains: bool
    _read: dict[bool, Tensor]
    _hooks: dict[int, Callable[[Tensor], Any]]

    @staticmethod
    def make(product: Callable[[], Tensor], like: Tensor, columns: int, dtype: torch.dtype) -> Any:
        """Make one in the place of `product()`, whose rows and device are those of `like`."""
        shape = (*like.shape[:-1], columns)
        found: Any = Tensor._make_wrapper_subclass(Logits, shape, dtype=dtype, device=like.device)
        trains = like._trains if isinstance(like, Logits) else like.requires_grad
        found._product, found._trains, found._read = product, trains, {}
        found._hooks = OrderedDict()  # a handle of torch's keeps a weak reference to it
        return found

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _TRAINING:
            return args[0]._trains
        if func is Tensor.register_hook:
            return args[0]._add_hook(*args[1:], **kwargs)
        if func in _HOOKS:
            name = getattr(func, "__name__", str(func))
            raise UnreadableLogits(problem=f"{name} asks for what only kept logits have")
        if func is Tensor.float and len(args) == 1 and not kwargs:
            return args[0]._cast(torch.float32)
        args, kwargs = tree_map_only(Logits, _computed, (tuple(args), dict(kwargs)))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        raise UnreadableLogits(problem=f"{func} asks for what only kept logits have")

    def _add_hook(self, hook: Callable[[Tensor], Any]) -> RemovableHandle:
        """Have a hook, as FSDP gives each output, called with the gradient of what is read."""
        if not self._trains:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        if True in self._read:
            self._read[True].register_hook(functools.partial(_call, self._hooks, handle.id))
        return handle

    def _cast(self, dtype: torch.dtype) -> Any:
        """Return the same in another dtype, computed when that is read."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.dtype == dtype:
                return self
            return Logits.make(lambda: _computed(self).to(dtype), self, self.shape[-1], dtype)


def _call(hooks: dict[int, Callable[[Tensor], Any]], number: int, gradient: Tensor) -> Any:
    return hooks[number](gradient) if number in hooks else None  # it may have been removed


def _computed(logits: Logits) -> Tensor:
    trains = logits._trains and torch.is_grad_enabled()
    if trains not in logits._read:
        if not torch.compiler.is_compiling():
            warn_once(_READ)
        if any(map(_version, logits._read.values())):
            raise UnreadableLogits(problem=_WRITTEN)
        logits._read[trains] = made = logits._product()
        for number in logits._hooks if trains else ():
            made.register_hook(functools.partial(_call, logits._hooks, number))
        logits._read[False] = made.detach()  # what is written to one is written to both
    return logits._read[trains]


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names}


_METADATA = {
    *_getters("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu", "is_sparse"),
    *_getters("is_meta", "is_quantized", "is_nested", "is_mps", "is_xpu"),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device, Tensor.element_size),
    *(Tensor.stride, Tensor.is_contiguous, Tensor.__hash__),
}
_TRAINING = _getters("requires_grad")
_HOOKS = {Tensor.retain_grad, *_getters("grad")}


def with_logits(compiled: Any, gm: fx.GraphModule, recipes: Sequence[Recipe]) -> Callable[..., Any]:
    """Return `compiled` with the outputs that Dynamo knows, logits among them."""
    count = min(recipe.inputs[0] for recipe in recipes)
    places = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}

    def run(*args: Any) -> Any:
        outputs = list(compiled(*args))
        for recipe in recipes:
            outputs[recipe.place] = _make(recipe, outputs, lambda n: _given(gm, places, args, n))
        return tuple(outputs[:count])

    return run


def _given(
    gm: fx.GraphModule, places: Mapping[fx.Node, int], args: Sequence[Any], node: fx.Node
) -> Any:
    return args[places[node]] if node in places else gm.get_parameter(str(node.target))


def _make(recipe: Recipe, outputs: Sequence[Any], given: Callable[[fx.Node], Any]) -> Any:
    inputs = [outputs[i] for i in recipe.inputs]
    weights = [given(node) for node in recipe.weights]
    bias = None if recipe.bias is None else given(recipe.bias)
    dtype = recipe.computed
    states = [_State(weight) for weight in (*weights, *([] if bias is None else [bias]))]
    versions = [_version(x) for x in inputs]

    def product() -> Tensor:
        if any(state.is_gone() for state in states):
            raise UnreadableLogits(problem=_GONE)
        if any(state.has_changed() for state in states):
            raise UnreadableLogits(problem=_CHANGED)
        if [_version(x) for x in inputs] != versions:
            raise UnreadableLogits(problem=_OVERWRITTEN)
        with torch.autocast(inputs[0].device.type, enabled=False):
            parts = [
                torch.nn.functional.linear(x.to(dtype), weight.to(dtype))
                for x, weight in zip(inputs, weights, strict=True)
            ]
            parts = [p if s == 1 else p * s for p, s in zip(parts, recipe.scales, strict=True)]
            total = sum(parts[1:], parts[0])
            return (total if bias is None else total + bias.to(dtype)).to(recipe.dtype)

    return Logits.make(product, inputs[0], weights[0].shape[0], recipe.dtype)
