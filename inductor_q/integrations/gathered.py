"""Give the weights that FSDP gathers their quantization states, before a layer is called.

Dynamo reads the state of a gathered weight from the layer that keeps it (`capture.bnb_gathered`),
and notes it on the weight. Under gradient checkpointing it cannot: a segment that is run twice may
change nothing outside of it. So the state is noted here, in a hook, which is no part of a graph.

What a state holds stays where it is, but Dynamo knows that of parameters alone in what FSDP shards.
Told so, CUDA graphs read it in place, where they would copy it in each call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from inductor_q.capture import STATE_IS_NOTED


def note_states(part: nn.Module) -> None:
    """Let `part`, which FSDP has sharded, note the state of each weight that was gathered."""
    layers: list[Any] = [
        layer
        for layer in part.modules()
        if vars(layer).get("quant_state") is not None and not hasattr(layer, STATE_IS_NOTED)
    ]
    for layer in layers:
        setattr(layer, STATE_IS_NOTED, True)
        for tensor in _tensors(layer.quant_state):
            torch._dynamo.mark_static_address(tensor, guard=False)

    def note(*_: object) -> None:
        for layer in layers:
            if getattr(layer.weight, "quant_state", None) is None:
                layer.weight.quant_state = layer.quant_state

    if layers:  # FSDP2's hook stands before all others
        part.register_forward_pre_hook(torch.compiler.disable(note))


def _tensors(state: Any) -> Iterator[Tensor]:
    """Yield what a quantization state holds, and the state of its scales with it."""
    for value in vars(state).values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, type(state)):
            yield from _tensors(value)
