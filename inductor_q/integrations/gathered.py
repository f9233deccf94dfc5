"""Give the weights that FSDP gathers their quantization states, before a layer is called.

Dynamo reads the state of a gathered weight from the layer that keeps it (`capture.bnb_gathered`),
and notes it on the weight. Under gradient checkpointing it cannot: a segment that is run twice may
change nothing outside of it. So the state is noted here, in a hook, which is no part of a graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

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

    def note(*_: object) -> None:
        for layer in layers:
            if getattr(layer.weight, "quant_state", None) is None:
                layer.weight.quant_state = layer.quant_state

    if layers:  # FSDP2's hook stands before all others
        part.register_forward_pre_hook(torch.compiler.disable(note))
