"""Do before anything is traced what bitsandbytes does in the first call of its layers.

A 4-bit layer casts its bias in place to the dtype that it computes in, which Dynamo cannot trace:
it gives the whole call up. PEFT's `prepare_model_for_kbit_training` makes such biases float32, as
it does every parameter of 16 bits, and so does loading by name in float32. A layer of LLM.int8
takes its codes from the weight into a state, on which Dynamo guards: the second step would be
compiled again. It casts its bias, too, to the dtype of each input, which autocast decides: in one
model the layers after a norm may get float32, and those after attention 16 bits. So nothing can be
cast before, and the layer is given a forward that leaves its bias as it is.
"""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any

from torch import Tensor, nn

from inductor_q.integrations.methods import has_own_forward, name_of_forward


def prepare_first_call(model: nn.Module) -> None:
    """Leave the layers of bitsandbytes in `model` as their first call does.

    A 4-bit layer whose `compute_dtype` is open until its first input is left alone, and so are its
    biases that FSDP2 has sharded, and a layer of LLM.int8 whose forward somebody has replaced.
    """
    library = sys.modules.get("bitsandbytes.nn")
    four, eight = (getattr(library, name, ()) for name in ("Linear4bit", "Linear8bitLt"))
    for layer in model.modules():
        if isinstance(layer, four):
            _cast_bias(layer)
        elif isinstance(layer, eight):
            if getattr(layer.weight, "CB", None) is not None:
                layer.init_8bit_state()
            packed = not layer.state.has_fp16_weights
            if packed and layer.bias is not None and has_own_forward(layer):
                setattr(layer, name_of_forward(layer), MethodType(forward, layer))


def _cast_bias(layer: Any) -> None:
    bias, dtype = layer.bias, layer.compute_dtype
    if dtype is not None and type(bias) is nn.Parameter and bias.dtype != dtype:
        bias.data = bias.data.to(dtype)


def forward(self: Any, x: Tensor) -> Tensor:
    """Compute what a layer of LLM.int8 does, with a bias that is cast beside the parameter.

    It has the name of the method that it replaces, so that a layer which is saved whole has that
    method when it is loaded.
    """
    from bitsandbytes import matmul  # type: ignore[attr-defined]

    state = self.state
    state.is_training = self.training
    if self.weight.CB is not None:  # of a weight that came since, as accelerate's offloading does
        self.init_8bit_state()
    bias = None if self.bias is None else self.bias.to(x.dtype)
    result: Tensor = matmul(x, self.weight, bias=bias, state=state)
    if state.CB is not None:
        self.weight.data = state.CB
    return result
