"""Do before anything is traced what bitsandbytes does in the first call of its layers.

A 4-bit layer casts its bias in place to the dtype that it computes in, which Dynamo cannot trace:
it gives the whole call up. PEFT's `prepare_model_for_kbit_training` makes such biases float32, as
it does every parameter of 16 bits, and so does loading by name in float32. A layer of LLM.int8
takes its codes from the weight into a state, on which Dynamo guards: the second step would be
compiled again.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def prepare_first_call(model: nn.Module) -> None:
    """Leave the layers of bitsandbytes in `model` as their first call does.

    A 4-bit layer whose `compute_dtype` is open until its first input is left alone, and so are
    biases that FSDP2 has sharded, and those of LLM.int8, whose dtype is that of the input.
    """
    library = sys.modules.get("bitsandbytes.nn")
    four, eight = (getattr(library, name, ()) for name in ("Linear4bit", "Linear8bitLt"))
    for layer in model.modules():
        if isinstance(layer, four):
            _cast_bias(layer)
        elif isinstance(layer, eight) and getattr(layer.weight, "CB", None) is not None:
            layer.init_8bit_state()


def _cast_bias(layer: Any) -> None:
    bias, dtype = layer.bias, layer.compute_dtype
    if dtype is not None and type(bias) is nn.Parameter and bias.dtype != dtype:
        bias.data = bias.data.to(dtype)
