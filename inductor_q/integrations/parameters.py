"""Let PEFT's LoRA on parameters (`target_parameters`) be computed inside of the graph.

PEFT adapts a parameter, such as the fused experts of a layer or the weight of its router, by
registering a parametrization before each forward of the module that holds it, and removing it
behind. Dynamo traces neither, so the graph breaks in every layer. Here the module is called with
the adapted weight in the parameter's place (`torch.func.functional_call`). The weight is computed
from what PEFT computes it from, and is bitwise the same.

It is as large as the parameter, and so is its gradient. Experts that `experts.use_qfuse` computes
need neither: their products take A and B as they are.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from inductor_q import capture
from inductor_q.experts.forward import IMPLEMENTATION, Adapter, experts_forward
from inductor_q.integrations.methods import has_own_forward, replace_method

#: Of other dtypes PEFT adds in a wider one and clamps.
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def prepare_parameters(model: nn.Module) -> None:
    """Give PEFT's layers over parameters of `model` a forward that can be traced.

    Parameters of other dtypes than 64, 32 and 16 bits of floating point are left to PEFT, and those
    that bitsandbytes' `replace_parameter_4bit`, FSDP2, DeepSpeed or accelerate's offloading holds.
    A model that `torch.save` has written whole comes back with PEFT's own: prepare it again, and
    after `add_adapter`. Experts that `inductor_q.experts.use_qfuse` computes add what their
    adapters compute to their products from then on, and no adapted weight is made.
    """
    kind = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", None)
    for wrapper in model.modules():
        if type(wrapper) is kind and has_own_forward(wrapper) and is_plain(wrapper):
            replace_method(wrapper, forward)


def is_plain(wrapper: Any) -> bool:
    """Whether the parameter below a layer of PEFT's is a whole tensor that its module holds."""
    held = wrapper.get_base_layer()._parameters.get(wrapper.parameter_name)
    return (
        type(held) is nn.Parameter
        and held.dtype in _DTYPES
        and not held.is_meta
        and not hasattr(held, "ds_shape")
    )


def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call the base layer with its adapters, as `ParamWrapper.forward` does."""
    if not _adapts(self) or kwargs.get("adapter_names") is not None:
        return type(self).forward(self, x, *args, **kwargs)
    kwargs.pop("adapter_names", None)
    base = self.get_base_layer()
    if _is_ours(base) and (adapters := _factors(self)) is not None:
        return functools.partial(experts_forward, adapters=adapters)(base, x, *args, **kwargs)
    path, held = self.parameter_name, self.base_layer
    while held is not base:  # another such layer, over another parameter
        path, held = f"base_layer.{path}", held.base_layer
    weight = _adapted(self, _active(self))
    return torch.func.functional_call(self.base_layer, {path: weight}, (x, *args), kwargs)


def _adapts(wrapper: Any) -> bool:
    off = wrapper.disable_adapters or wrapper.merged
    return not off and bool(_active(wrapper)) and is_plain(wrapper)


def _active(wrapper: Any) -> list[str]:
    return [name for name in wrapper.active_adapters if name in wrapper.lora_A]


def _adapted(wrapper: Any, names: list[str]) -> Tensor:
    """Return the adapted weight, by PEFT's own steps."""
    weight: Tensor = wrapper.get_param()
    if len(names) == 1 and wrapper.num_experts > 1 and hasattr(wrapper, "get_delta_factors"):
        left, right, scaling = wrapper.get_delta_factors(names[0])
        with torch.autocast(weight.device.type, enabled=False):
            return torch.baddbmm(weight, left, right, alpha=scaling)
    first, *others = (wrapper.get_delta_weight(name) for name in names)
    adapted: Tensor = weight + sum(others, start=first)
    return adapted


# --- experts that are computed here ---------------------------------------------------------------


def _is_ours(base: Any) -> bool:
    """Whether `experts_forward` computes a layer of experts, and nothing happens around it."""
    return (
        capture.holds_experts(base)
        and base.config._experts_implementation == IMPLEMENTATION
        and "forward" not in vars(base)  # which Dynamo can tell, unlike `has_own_forward`
        and not (base._forward_hooks or base._forward_pre_hooks)
    )


def _wrappers(outermost: Any) -> Iterator[Any]:
    held, base = outermost, outermost.get_base_layer()
    while held is not base:
        yield held
        held = held.base_layer


def _factors(outermost: Any) -> dict[str, Adapter] | None:
    """Return the adapters of all parameters below; None where one has another number than one."""
    found = {}
    for wrapper in _wrappers(outermost):
        if _adapts(wrapper):
            names = _active(wrapper)
            if len(names) != 1 or not hasattr(wrapper, "get_delta_factors"):
                return None
            left, right, scaling = wrapper.get_delta_factors(names[0])
            transposed = wrapper.get_base_layer().is_transposed
            a, b = (left.mT, right.mT) if transposed else (right, left)
            found[wrapper.parameter_name] = Adapter(a, b, scaling)
    return found
