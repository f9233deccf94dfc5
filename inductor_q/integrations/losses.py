"""Compile the head and the loss of a model whose layers are compiled one by one.

Only the graph of a whole model has its loss beside its head, which is what `chunk_loss` needs so
that logits are never all in memory. Here they are a graph of their own: what comes before it runs
as it is, layer by layer, and then forward is compiled with the decoder's outputs as inputs.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from inductor_q.integrations.states import states_of

#: What a decoder holds while its model's forward runs: that this ends behind the decoder; and then
#: a list with what the decoder returned, which is empty once that is used.
_ENDS, _OUTPUTS = "_qfuse_ends", "_qfuse_outputs"


class _Reached(BaseException):
    """End a forward behind its decoder. No handler of exceptions is meant to catch it."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self.outputs = outputs


def compile_loss(model: nn.Module) -> None:
    """Have the loss of a causal language model compiled where it pays, from the next call on.

    A model whose forward, or whose decoder's, somebody has replaced stays as it is. What an earlier
    call did here, `leave_loss` has to take back before.
    """
    decoder = getattr(model, "base_model", None)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(decoder, nn.Module) or decoder is model or head is None:
        return
    if "forward" in vars(model) or "forward" in vars(decoder):
        return
    # Copies of a model have these, too, but no compiled layers: there they do what they replace.
    model.forward = MethodType(_forward, model)
    decoder.forward = MethodType(_decode, decoder)


def leave_loss(model: nn.Module) -> None:
    """Take back what `compile_loss` did."""
    for part in model.modules():
        if getattr(vars(part).get("forward"), "__func__", None) in (_forward, _decode):
            del part.forward


def _forward(model: Any, *args: Any, **given: Any) -> Any:
    states = next(states_of(model), None) if _trains(model, given) else None
    if states is None or not states.chunks(model, given["labels"]):
        return type(model).forward(model, *args, **given)
    decoder = vars(model.base_model)
    decoder[_ENDS] = True
    try:
        returned = type(model).forward(model, *args, **given)
    except _Reached as reached:
        outputs = reached.outputs
    else:  # it had no use for the decoder
        return returned
    finally:
        del decoder[_ENDS]
    decoder[_OUTPUTS] = [outputs]
    try:
        return states.loss(model, args, given, outputs)
    finally:
        del decoder[_OUTPUTS]


def _decode(decoder: nn.Module, *args: Any, **given: Any) -> Any:
    held = decoder.__dict__
    if made := held.get(_OUTPUTS):
        return made.pop()  # a second call is another one
    outputs = type(decoder).forward(decoder, *args, **given)
    if _ENDS in held:
        raise _Reached(outputs)
    return outputs


# Pickle looks a method up by its function's name: a model that is loaded has its class's.
_forward.__name__ = _decode.__name__ = "forward"


def _trains(model: Any, given: dict[str, Any]) -> bool:
    """Whether this is a step of training, with a decoder that has no hooks around its forward."""
    if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()):
        return False
    if not isinstance(given.get("labels"), Tensor):
        return False
    hooks = model.base_model._forward_pre_hooks or model.base_model._forward_hooks
    return not hooks and given.get("past_key_values") is None
