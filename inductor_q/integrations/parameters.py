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
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from inductor_q import capture
from inductor_q.experts.forward import IMPLEMENTATION, Adapter, experts_forward
from inductor_q.experts.modules import PROJECTIONS
from inductor_q.integrations.methods import has_own_forward, is_hooked, name_of_forward

#: PEFT adds to FP8 in a wider dtype, and clamps.
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def prepare_parameters(model: nn.Module) -> None:
    """Give PEFT's layers over parameters of `model` a forward that can be traced.

    Where the parameter is not in 16, 32 or 64 bits of floating point, or where bitsandbytes'
    `replace_parameter_4bit`, FSDP2, DeepSpeed or accelerate's offloading holds it while its module
    is called, PEFT still computes, and the graph breaks. Prepare a model again after `add_adapter`,
    and after `torch.load`, which restores the forward of PEFT.

    From then on, experts that `inductor_q.experts.use_qfuse` computes add what their adapters
    compute to their products, and no adapted weight is made. One is still made for several active
    adapters at once, for adapters of biases, for experts with hooks, and with a PEFT whose layers
    give no factors (0.18).
    """
    kind = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", None)
    for wrapper in model.modules():
        if type(wrapper) is kind and has_own_forward(wrapper):
            setattr(wrapper, name_of_forward(wrapper), MethodType(forward, wrapper))


def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call the base layer with its adapters, as `ParamWrapper.forward` does."""
    if not _adapts(self) or not is_plain(self) or kwargs.get("adapter_names") is not None:
        return type(self).forward(self, x, *args, **kwargs)
    kwargs.pop("adapter_names", None)
    if (adapters := _adapters(self)) is not None:
        ours = functools.partial(experts_forward, adapters=adapters)
        return ours(self.get_base_layer(), x, *args, **kwargs)
    inner = len([*_wrappers(self)]) - 1  # other such layers, over other parameters
    weights = {"base_layer." * inner + self.parameter_name: _adapted(self)}
    return torch.func.functional_call(
        self.base_layer, weights, (x, *args), kwargs, tie_weights=False
    )


def is_plain(wrapper: Any) -> bool:
    """Whether the parameter below a layer of PEFT's is a whole tensor that its module holds."""
    held = wrapper.get_base_layer()._parameters.get(wrapper.parameter_name)
    return (
        type(held) in (Tensor, nn.Parameter)
        and held.dtype in _DTYPES
        and not held.is_meta
        and not hasattr(held, "ds_shape")
    )


def _adapts(wrapper: Any) -> bool:
    return not (wrapper.disable_adapters or wrapper.merged) and bool(_active(wrapper))


def _active(wrapper: Any) -> list[str]:
    return [name for name in wrapper.active_adapters if name in wrapper.lora_A]


def _wrappers(outermost: Any) -> Iterator[Any]:
    held, base = outermost, outermost.get_base_layer()
    while held is not base:
        yield held
        held = held.base_layer


def _factors(wrapper: Any) -> tuple[Tensor, Tensor, float] | None:
    """Return left, right and scaling of the only active adapter of experts, where PEFT adds these
    and not their product."""
    factors = getattr(wrapper, "get_delta_factors", None)
    names = _active(wrapper)
    if factors is None or len(names) != 1 or wrapper.num_experts == 1:
        return None
    found: tuple[Tensor, Tensor, float] = factors(names[0])
    return found


def _adapted(wrapper: Any) -> Tensor:
    """Return the adapted weight, by PEFT's own steps."""
    weight: Tensor = wrapper.get_param()
    if (factors := _factors(wrapper)) is not None:
        left, right, scaling = factors
        with torch.autocast(weight.device.type, enabled=False):
            return torch.baddbmm(weight, left, right, alpha=scaling)
    first, *others = (wrapper.get_delta_weight(name) for name in _active(wrapper))
    adapted: Tensor = weight + sum(others, start=first)
    return adapted


# --- experts that are computed here ---------------------------------------------------------------


def _adapters(outermost: Any) -> dict[str, Adapter] | None:
    """Return the adapters of all projections; None where `experts_forward` does not compute them,
    or cannot with these adapters."""
    base = outermost.get_base_layer()
    if not _is_ours(base):
        return None
    found = {}
    for wrapper in _wrappers(outermost):
        if is_hooked(wrapper) and wrapper is not outermost:
            return None
        if not _adapts(wrapper):
            continue
        is_projection = wrapper.parameter_name in PROJECTIONS and is_plain(wrapper)
        factors = _factors(wrapper) if is_projection else None
        if factors is None:
            return None
        left, right, scaling = factors
        a, b = (left.mT, right.mT) if base.is_transposed else (right, left)
        # PEFT keeps experts innermost, which torch's grouped product does not read.
        found[wrapper.parameter_name] = Adapter(a.contiguous(), b.contiguous(), scaling)
    return found


def _is_ours(base: Any) -> bool:
    """Whether `experts_forward` computes a layer of experts, and nothing happens around it."""
    return (
        capture.holds_experts(base)
        and base.config._experts_implementation == IMPLEMENTATION
        and "forward" not in vars(base)  # which Dynamo can tell, unlike `has_own_forward`
        and not is_hooked(base)
    )
