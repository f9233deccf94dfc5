"""Let PEFT's LoRA on parameters (`target_parameters`) be computed inside of the graph.

PEFT adapts a parameter, such as the fused experts of a layer or the weight of its router, by
registering a parametrization before each forward of the module that holds it, and removing it
behind. Dynamo traces neither, so the graph breaks in every layer. Here the module is called with
the adapted weight in the parameter's place (`torch.func.functional_call`). The weight is computed
from what PEFT computes it from, and is bitwise the same.

It is as large as the parameter, and so is its gradient. Experts that `experts.use_qfuse` computes
need neither: their products take A and B as they are. `inductor_q.compile` has experts computed so
where that was measured to be faster.
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
from inductor_q.experts.model import compute_here
from inductor_q.experts.modules import PROJECTIONS, projections
from inductor_q.integrations.methods import has_own_forward, is_hooked, name_of_forward
from inductor_q.log import log

#: PEFT adds to FP8 in a wider dtype, and clamps.
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

#: Who computes experts in transformers, unless somebody has asked for another.
DEFAULT = "grouped_mm"


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

    Who computes experts stays as it is, so a compile of one's own may keep torch's grouped product
    under adapted weights. `inductor_q.compile` and `QfuseCallback` choose.
    """
    for wrapper in _layers_of_peft(model):
        if has_own_forward(wrapper):
            setattr(wrapper, name_of_forward(wrapper), MethodType(forward, wrapper))


def _layers_of_peft(model: nn.Module) -> Iterator[Any]:
    kind = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", None)
    return (module for module in model.modules() if type(module) is kind)


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
    return _is_whole(wrapper.get_base_layer()._parameters.get(wrapper.parameter_name))


def _is_whole(held: Any) -> bool:
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
    return _of_projections(outermost, IMPLEMENTATION)


def _of_projections(outermost: Any, implementation: str) -> dict[str, Adapter] | None:
    """Return them for experts of this implementation; None where their products cannot add them."""
    base = outermost.get_base_layer()
    if not _is_computed_by(base, implementation):
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


def _is_computed_by(base: Any, implementation: str) -> bool:
    """Whether this is who computes a layer of experts, and nothing happens around it."""
    return (
        capture.holds_experts(base)
        and base.config._experts_implementation == implementation
        and "forward" not in vars(base)  # which Dynamo can tell, unlike `has_own_forward`
        and not is_hooked(base)
    )


# --- experts that come to be computed here --------------------------------------------------------


def prefer_products(model: nn.Module) -> None:
    """Compute experts that PEFT adapts as `experts.use_qfuse` does, where that is faster.

    These are layers that `prepare_parameters` has prepared, with fused parameters that are whole,
    in 16 bits and on a device that gains by it, whose products can add the adapters. transformers'
    default must be what computes them: whoever has chosen another keeps it. One configuration says
    who computes all layers that share it, so where one of these is otherwise, all stay.
    """
    outermost: dict[Any, Any] = {}
    for wrapper in _layers_of_peft(model):
        outermost.setdefault(wrapper.get_base_layer(), wrapper)
    if not outermost:
        return
    layers: list[Any] = [module for module in model.modules() if capture.holds_experts(module)]
    fit = {layer for layer in layers if layer in outermost and _is_fit(outermost[layer])}
    others = {id(layer.config) for layer in layers if layer not in fit}
    chosen = [layer for layer in fit if id(layer.config) not in others]
    if chosen:
        compute_here(chosen)
        log.info(
            "%d layers of experts with adapters of PEFT's are computed by qfuse's products from "
            "now on, which take A and B as they are, where an adapted weight of all experts would "
            "be made in each step",
            len(chosen),
        )


def gains(device: torch.device) -> bool:
    """Whether such experts are faster with products of ours on a device, as far as is known.

    It was measured on an H200 only: compute capability 9.0. Later ones are taken to be like it.
    """
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


def _is_fit(outermost: Any) -> bool:
    base = outermost.get_base_layer()
    held = [base._parameters.get(name) for name in projections(base)]
    prepared = getattr(outermost, name_of_forward(outermost))
    with torch.no_grad():
        return (
            getattr(prepared, "__func__", None) is forward
            and all(wrapper.parameter_name in PROJECTIONS for wrapper in _wrappers(outermost))
            and all(_is_whole(each) and each.itemsize == 2 and gains(each.device) for each in held)
            and _of_projections(outermost, DEFAULT) is not None
        )
