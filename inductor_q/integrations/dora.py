"""Let the norm of PEFT's DoRA be computed inside of the graph, from the packed weight.

DoRA scales each row of `W + s B A` by a learned magnitude over its norm. PEFT decodes the weight by
a function that Dynamo cannot trace, which breaks the graph in every layer, and adds `s B A` to it
as a dense matrix. Here the norm comes from its parts,

    |w + s b A|^2 = |w|^2 + 2 s b.(A w) + s^2 b.(A A') b,

with `w` a row of W and `b` one of B: nothing but the weight itself has its size, and that is
decoded once for the norm and for the product. Sums are float32, and `A w` is a product in the
weight's dtype. The result is rounded as PEFT's is, and takes no gradient, as there.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from inductor_q.integrations.methods import is_replaced, replace_method
from inductor_q.loading.decodes import decoded, mend_decodes


def prepare_dora(model: nn.Module) -> None:
    """Give the DoRA layers of `model`, those of linear layers, a forward that can be traced.

    A model that `torch.save` has written whole comes back with PEFT's own: prepare it again. Called
    before adapters are attached, it has PEFT decode all weights whose format is known here, where
    PEFT fails by itself: torchao's `NF4Tensor` and int4. `inductor_q.quantize` does that as well.
    """
    mend_decodes()
    kind = getattr(sys.modules.get("peft.tuners.lora.dora"), "DoraLinearLayer", None)
    for layer in model.modules():
        if type(layer) is kind and not is_replaced(layer, "forward"):
            replace_method(layer, forward)


def forward(
    self: Any,
    x: Tensor,
    *,
    lora_A: Any,
    lora_B: Any,
    scaling: Any,
    base_layer: Any,
    base_result: Tensor | None = None,
    adapter_name: str = "default",
) -> Tensor:
    """Return what is added to the base layer's output, as `DoraLinearLayer.forward` does."""
    weight = _weight(base_layer, (x if base_result is None else base_result).dtype)
    if self.fan_in_fan_out:
        weight = weight.T
    with torch.autocast(x.device.type, enabled=False):
        norm = row_norms(weight, lora_A.weight.detach(), lora_B.weight.detach(), scaling)
    scale = (self.weight / norm.to(x.dtype).detach()).view(1, -1)
    adapted = lora_B(lora_A(x))
    if base_result is None:  # of an input that dropout has changed
        base_result = functional.linear(x, weight.to(x.dtype))
    elif base_layer.bias is not None:
        base_result = base_result - base_layer.bias.to(base_result.dtype)
    total: Tensor = (scale - 1) * base_result + scale * adapted * scaling
    return total


def row_norms(weight: Tensor, a: Tensor, b: Tensor, scaling: Any) -> Tensor:
    """Return the norm of each row of `weight + scaling * b @ a`, in float32."""
    projected = functional.linear(weight, a.to(weight.dtype)).float()
    a, b = a.float(), b.float()
    own = weight.square().sum(1, dtype=torch.float32)  # with no copy of the weight in float32
    across = (projected * b).sum(1)
    # Not a product that reads a product, which would look like an adapter's.
    added = torch.einsum("nr,rs,ns->n", b, a @ a.T, b)
    total: Tensor = own + 2 * scaling * across + scaling * scaling * added
    return total.clamp_min(0).sqrt()


def _weight(layer: Any, dtype: torch.dtype) -> Any:
    """Decode the weight, to `dtype` where it shows the dtype of its codes: that of the product."""
    weight = layer.weight
    state = getattr(weight, "quant_state", None)
    if state is not None:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(weight.data, state)
    values = decoded(layer, dtype)
    if values is not None:
        return values
    from peft.utils.integrations import dequantize_module_weight

    return dequantize_module_weight(layer)
