"""Give layers that are compiled one by one what transformers made their mask of.

A layer's graph has the mask as an input, and cannot tell what a matrix of booleans means. Its parts
are small, and the graph makes the mask of them as transformers does, so that `causal_attention`
reads there what it reads in the graph of a whole model.

transformers is imported only where layers of its models are compiled.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

#: By mask: its version when it was made, and what it was made of.
_noted: WeakIdKeyDictionary = WeakIdKeyDictionary()

#: What marks a forward that makes its mask.
_MAKES = "_qfuse_makes_mask"

#: The bytes up to which a mask is made that a look would have spared.
_MOST = 1 << 28

#: transformers.masking_utils, once `note_parts` has met it: a graph of torch 2.11 cannot import it.
masking_utils: Any = None

#: The `least` of `without_a_look`.
_unseen: ContextVar[int | None] = ContextVar("_unseen", default=None)

#: What transformers gives its maker of masks.
_SIZES = {"q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "use_vmap"}


@dataclass(frozen=True)
class MaskParts:
    """Hold what a causal mask of B sequences of length S is made of.

    Args:
        padding: which keys are valid, bool [B, S]; None where all are.
        sequences: of which document each position is, int64 [B, S]; None where there is only one.
        positions: of each position, its place in its document, int64 [B, S]; None where
            transformers does not ask for it.
        window: how many keys before it a query sees, itself included; None where it sees all.
    """

    padding: Tensor | None = None
    sequences: Tensor | None = None
    positions: Tensor | None = None
    window: int | None = None

    def mask(self, x: Tensor) -> Tensor:
        """Make the mask, bool [B, 1, S, S], for a layer's input `x` [B, S, features]."""
        function: Any = masking_utils.causal_mask_function
        sequences = self.sequences
        if self.window is not None:
            function = masking_utils.sliding_window_causal_mask_function(self.window)
        if self.positions is not None:
            # In a graph these are numbers that only grow, which is what makes the rest provable.
            sequences = masking_utils.find_packed_sequence_indices(self.positions)
            assert sequences is not None, "positions are noted where there are several documents"
            function = masking_utils.remap_positions_for_packed_sequence(function, self.positions)
        if sequences is not None:
            apart = masking_utils.packed_sequence_mask_function(sequences)
            function = masking_utils.and_masks(function, apart)
        rows, length = x.shape[:2]
        made: Any = masking_utils.sdpa_mask(
            batch_size=rows,
            q_length=length,
            kv_length=length,
            mask_function=function,
            attention_mask=self.padding,
            allow_is_causal_skip=False,
            device=x.device,
        )
        assert isinstance(made, Tensor), "only those that may be skipped are None"
        return made


def note_parts(model: nn.Module) -> bool:
    """Let masks for scaled_dot_product_attention note what they are made of, and say whether they
    do: those of transformers' models, where nobody has registered a maker of masks of his own.

    From then on transformers' own maker notes it in every model of the process. Versions without a
    registry, and those whose maker is given other sizes (4.57), are left as they are.
    """
    global masking_utils
    theirs = any(type(module).__module__.startswith("transformers.") for module in model.modules())
    masking_utils = sys.modules.get("transformers.masking_utils")
    makers: Any = getattr(masking_utils, "ALL_MASK_ATTENTION_FUNCTIONS", None)
    if not theirs or makers is None:
        return False
    make = makers["sdpa"]
    if make is masking_utils.sdpa_mask and inspect.signature(make).parameters.keys() >= _SIZES:
        type(makers).register("sdpa", _Noting(make))
    return isinstance(makers["sdpa"], _Noting)


class _Noting:
    """Make masks by `make`, and note on each what it is made of."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    def __call__(self, *args: Any, **given: Any) -> Any:
        if args or torch.compiler.is_compiling():
            return self.make(*args, **given)
        parts = _parts(given)
        if parts is not None and parts.padding is not None and _is_made_unseen(given):
            given["allow_is_causal_skip"] = False
        mask = self.make(**given)
        if isinstance(mask, Tensor) and not mask.is_inference():
            _noted[mask] = mask._version, parts
        return mask


def _is_made_unseen(given: dict[str, Any]) -> bool:
    least, length = _unseen.get(), given["q_length"]
    size = given["batch_size"] * length * given["kv_length"]
    return least is not None and torch.is_grad_enabled() and length >= least and size <= _MOST


@contextlib.contextmanager
def without_a_look(least: int | None) -> Iterator[None]:
    """Have masks of padding made also for batches in which nothing is padded.

    transformers looks whether something is: the host waits for the device then, and a layer has a
    second graph, without a mask.

    Args:
        least: the number of positions from which on; None: leave it to transformers. Masks of more
            than `_MOST` bytes are left to it, too.
    """
    token = _unseen.set(least)
    try:
        yield
    finally:
        _unseen.reset(token)


def parts_of(mask: object, x: object) -> MaskParts | None:
    """Return what the mask of a layer's input `x` [B, S, features] is made of; None where that is
    not known, the mask was written to, or is elsewhere or of other sizes than the input."""
    if not isinstance(mask, Tensor) or mask.is_inference():
        return None
    version, parts = _noted.get(mask, (None, None))
    if mask._version != version:
        return None
    if not isinstance(x, Tensor) or x.dim() != 3 or x.device != mask.device:
        return None
    return parts if mask.shape == (x.shape[0], 1, x.shape[1], x.shape[1]) else None


def with_mask(args: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
    """Return what a layer is called with, the mask made of its parts."""
    parts = given.get("attention_mask")
    if not isinstance(parts, MaskParts):
        return given
    return {**given, "attention_mask": parts.mask(args[0])}


def make_mask_inside(layer: nn.Module) -> None:
    """Let a layer make its mask in `forward`: its hooks, as of FSDP, stay outside of its graph."""
    kind: Any = type(layer)
    if "forward" not in vars(layer):
        layer.forward = MethodType(_making(kind), layer)


def make_mask_outside(layer: nn.Module) -> None:
    """Take back what `make_mask_inside` did."""
    if _makes_mask(layer):
        del layer.forward


def takes_parts(layer: nn.Module) -> bool:
    """Whether a layer makes its mask, and no hook but FSDP's is given what it is made of."""
    if not layer._forward_pre_hooks and not layer._forward_hooks:
        return True
    hooks = [layer._forward_pre_hooks[i] for i in layer._forward_pre_hooks_with_kwargs]
    hooks += [layer._forward_hooks[i] for i in layer._forward_hooks_with_kwargs]
    known = (getattr(hook, "__module__", "").startswith("torch.distributed.") for hook in hooks)
    return _makes_mask(layer) and all(known)


def _makes_mask(layer: nn.Module) -> bool:
    return hasattr(getattr(vars(layer).get("forward"), "__func__", None), _MAKES)


@functools.cache
def _making(kind: Any) -> Any:
    """Return the forward of a class of layers, with the signature that it has, and a code object of
    its own, by which Dynamo keeps its graphs."""

    def forward(layer: nn.Module, *args: Any, **given: Any) -> Any:
        return kind.forward(layer, *args, **with_mask(args, given))

    forward.__code__ = forward.__code__.replace(co_name=kind.__name__)
    made = functools.wraps(kind.forward)(forward)
    setattr(made, _MAKES, True)
    return made


def _parts(given: dict[str, Any]) -> MaskParts | None:
    same = given["q_length"] == given["kv_length"]
    if not same or given.get("q_offset") or given.get("kv_offset") or given.get("use_vmap"):
        return None
    found: dict[str, Any] = {"padding": given.get("attention_mask")}
    is_causal = False
    for name, value in _conditions(given.get("mask_function", masking_utils.causal_mask_function)):
        is_causal |= name == "causal"
        if name == "unknown" or name in found:
            return None
        if name != "causal":
            found[name] = value
    return MaskParts(**found) if is_causal else None


def _conditions(function: Any) -> Iterator[tuple[str, Any]]:
    """Take a function of transformers' masks apart into conditions that all hold."""
    if function is masking_utils.causal_mask_function:
        yield "causal", None
        return
    name, held = "", dict[str, Any]()
    if isinstance(function, FunctionType) and function.__module__ == masking_utils.__name__:
        name = function.__qualname__.partition(".<locals>")[0]
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        held = {cell: content.cell_contents for cell, content in cells}
    match name, held:
        case "and_masks", {"mask_functions": functions}:
            for each in functions:
                yield from _conditions(each)
        case "sliding_window_overlay", {"sliding_window": int(window)}:
            yield "window", window
        case "packed_sequence_mask_function", {"packed_sequence_mask": sequences}:
            yield "sequences", sequences
        case "remap_positions_for_packed_sequence", {
            "mask_function": inner,
            "position_ids": positions,
        }:
            yield "positions", positions
            yield from _conditions(inner)
        case _:
            yield "unknown", None
