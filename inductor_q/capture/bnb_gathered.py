"""Let Dynamo trace bitsandbytes' layers whose weights FSDP2 gathers.

For the time of a layer's forward and backward FSDP2 puts a plain parameter, which holds the bytes
of all ranks, into the place of each `Params4bit`. `Linear4bit` and `Embedding4bit` then make a
`Params4bit` of it, by an assignment to `.data` that Dynamo cannot trace, so the graph breaks twice
in each layer. What they need of it is its `quant_state`, which the layer has kept: in a graph the
plain parameter gets that, and stays what it is.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from inductor_q.capture.library import STATE_IS_NOTED
from inductor_q.late import on_import

LAYERS = "bitsandbytes.nn.modules"


def trace_gathered() -> None:
    """Tell Dynamo how bitsandbytes' layers find the state of a weight that was gathered, as soon as
    bitsandbytes has been imported."""
    on_import(LAYERS, _substitute)


def _substitute() -> None:
    layers: Any = sys.modules[LAYERS]
    packed = layers.Params4bit

    @torch.compiler.substitute_in_graph(layers.fix_4bit_weight_quant_state_from_module)
    def find_quant_state(module: Any) -> None:
        if hasattr(module, STATE_IS_NOTED):
            return
        if not isinstance(module.weight, packed) or module.weight.quant_state is None:
            module.weight.quant_state = module.quant_state
