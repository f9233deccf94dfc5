"""Hold a result against float64: the model that stands for the exact one, and the error."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from inductor_q.testing.extras import bitsandbytes


def reference_model(model: nn.Module) -> nn.Module:
    """Return ``model`` in float64 with the dequantized weights in ordinary linears.

    Every faster path is measured against it.

    Parameter names are the same, so gradients compare by name. transformers computes its norms in
    fp32 whatever it is given, which leaves about 1e-7 of noise in the reference.
    """
    bnb = bitsandbytes()

    def plain(linear: Any) -> nn.Linear:
        state = copy.copy(linear.weight.quant_state)
        state.dtype = torch.float32
        # bitsandbytes multiplies with the weight rounded to the compute dtype: so does the
        # reference.
        weight = bnb.functional.dequantize_4bit(linear.weight.data, state).to(linear.compute_dtype)
        result = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
        result.weight = nn.Parameter(weight.double(), requires_grad=False)
        if linear.bias is not None:
            result.bias = nn.Parameter(linear.bias.detach().double(), requires_grad=False)
        return result

    # Swap first, copy, swap back: bitsandbytes parameters are not copied, only read.
    swapped: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, bnb.nn.Linear4bit):
                    swapped.append((parent, name, child))
                    setattr(parent, name, plain(child))
        return copy.deepcopy(model).double()
    finally:
        for parent, name, child in swapped:
            setattr(parent, name, child)


def relative_error(out: torch.Tensor, ref64: torch.Tensor) -> float:
    """Return ``|out - ref| / |ref|`` in float64.

    It is NaN when anything is NaN, so that no bound lets it pass.
    """
    ref = ref64.detach().double()
    difference = (out.detach().double().to(ref.device) - ref).norm()
    scale = ref.norm()
    if scale == 0:
        return float(difference)
    return float(difference / scale)
