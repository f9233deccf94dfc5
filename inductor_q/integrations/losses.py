"""Compile the head and the loss of a model whose layers are compiled one by one.

Only the graph of a whole model has its loss beside its head, which is what `chunk_loss` needs so
that logits are never all in memory. Here they are a graph of their own. Forward runs as it is until
its decoder has returned, layer by layer, and ends there. Then it is compiled from its beginning,
with a decoder that returns the same, so what comes before the decoder runs twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from inductor_q.integrations.caches import cache_of
from inductor_q.integrations.mask_parts import without_a_look
from inductor_q.integrations.methods import is_hooked
from inductor_q.integrations.states import States, called_by, set_region

#: Where a decoder has what it returned while forward is compiled: a list, which is empty once that
#: is used.
_OUTPUTS = "_qfuse_outputs"


class _Reached(BaseException):
    """End a forward behind its decoder. No handler of exceptions is meant to catch it."""

    def __init__(self, call: object, outputs: Any) -> None:
        super().__init__()
        self.call, self.outputs = call, outputs


@dataclass(frozen=True, eq=False)
class LossRegion:
    """Call a causal language model with its loss compiled, where that pays, and without a look at
    masks that no layer reads."""

    model: Any
    states: States
    decoder: Any
    given: MethodType = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "given", MethodType(_given, self.decoder))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trains = self._trains(kwargs)
        least = self.states.unread_from(kwargs["labels"].device) if trains else None
        evaluates = not trains and isinstance(kwargs.get("labels"), Tensor)
        with without_a_look(least), self.states.evaluating(evaluates):
            if not trains or self._is_left(kwargs):
                return self.model._call_impl(*args, **kwargs)
            return self._compiled(args, kwargs)

    def _compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        decoder, thread, call = self.decoder, threading.get_ident(), object()

        def end(*args: Any, **kwargs: Any) -> Any:
            outputs = decoder._call_impl(*args, **kwargs)
            if threading.get_ident() == thread:
                raise _Reached(call, outputs)
            return outputs

        decoder._compiled_call_impl = end
        try:
            returned = self.model._call_impl(*args, **kwargs)
        except _Reached as reached:
            if reached.call is not call:
                raise
            outputs = reached.outputs
        else:  # it does not call the decoder
            return returned
        finally:
            decoder._compiled_call_impl = None
        vars(decoder).update({_OUTPUTS: [outputs], "forward": self.given})
        try:
            return self.states.loss(self.model, args, kwargs, outputs)
        finally:
            del vars(decoder)[_OUTPUTS], vars(decoder)["forward"]

    def _trains(self, kwargs: dict[str, Any]) -> bool:
        """Whether this is a step of training with labels."""
        if torch.compiler.is_compiling() or not (self.model.training and torch.is_grad_enabled()):
            return False
        return cache_of(kwargs) is None and isinstance(kwargs.get("labels"), Tensor)

    def _is_left(self, kwargs: dict[str, Any]) -> bool:
        """Whether the loss is not to be compiled, or somebody else has a part in it."""
        taken = self.decoder._compiled_call_impl is not None or "forward" in vars(self.decoder)
        if taken or any(map(is_hooked, (self.decoder, *self._outside()))):
            return True
        return not self.states.chunks(self.model, kwargs["labels"])

    def _outside(self) -> Iterator[nn.Module]:
        """Yield what is in the graph of the loss: the model and its head, which FSDP may have
        sharded by itself."""
        yield self.model
        for child in self.model.children():
            if child is not self.decoder:
                yield from child.modules()


def compile_loss(model: nn.Module, states: States) -> None:
    """Have the loss of a causal language model compiled from the next call on.

    Nothing changes for other models: those without a decoder and a head that transformers knows,
    with an encoder, or with a loss that transformers chooses with a warning, which breaks a graph.
    """
    decoder = getattr(model, "base_model", None)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(decoder, nn.Module) or decoder is model or head is None:
        return
    knows_loss = getattr(model, "loss_type", None) or hasattr(model, "_loss_function")
    if knows_loss and not getattr(model.config, "is_encoder_decoder", False):
        set_region(model, LossRegion(model, states, decoder))


def leave_loss(model: nn.Module) -> None:
    """Take back what `compile_loss` did."""
    if isinstance(called_by(model), LossRegion):
        set_region(model, None)


def _given(decoder: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return in a graph what the decoder returned before; a second call is another one."""
    if torch.compiler.is_compiling() and (made := decoder.__dict__.get(_OUTPUTS)):
        return made.pop()
    return type(decoder).forward(decoder, *args, **kwargs)
