"""Have PEFT decode packed weights as they are decoded here.

PEFT 0.21 asks a tensor of torchao's for `dequantize()`: torchao's int4 has no such method, and
that of `NF4Tensor` is another function, so DoRA fails where it takes the first norms. Of LLM.int8
it moves the weight to the CPU that it is on, and loses the scales that the first call has given to
the layer. One function of PEFT's does both. It asks first whether a layer holds a weight in one of
our formats; every other layer is PEFT's own affair. The original is its `__wrapped__`.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn

from inductor_q import ops
from inductor_q.capture import packed_weight
from inductor_q.late import on_import
from inductor_q.log import warn_once

HOME, NAME = "peft.utils.integrations", "dequantize_module_weight"


@functools.cache
def mend_decodes() -> None:
    """Take over PEFT's decoding of weights: now, or as soon as somebody imports PEFT."""
    on_import(HOME, _mend)


def decoded(layer: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """Return the values of a layer's packed weight; None where it is for its library to decode.

    They have the dtype that the weight shows, or the one given where the weight shows its codes'.
    What bitsandbytes keeps in 4 bits is left to it: it decodes those on any device.
    """
    weight: Any = getattr(layer, "weight", None)
    if any(getattr(held, "quant_state", None) is not None for held in (weight, layer)):
        return None
    found = packed_weight(layer, "weight")
    if found is None or found.read is None:
        return None
    operands, name, shape = found.read()
    shows_values = weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return ops.dequantize(operands, name, shape, weight.dtype if shows_values else dtype)


def _mend() -> None:
    """Replace the function where it is, and where modules of PEFT's have imported it from there."""
    own: Any = vars(sys.modules[HOME]).get(NAME)
    if own is None:
        warn_once(f"{HOME} has no {NAME}: DoRA decodes weights as this PEFT does by itself")
        return

    @functools.wraps(own)
    def dequantize_module_weight(module: nn.Module) -> Any:
        values = decoded(module)
        return own(module) if values is None else values

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "peft" and vars(module).get(NAME) is own:
            setattr(module, NAME, dequantize_module_weight)
