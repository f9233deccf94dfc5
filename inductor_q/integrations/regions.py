"""Compile of a model what can be one graph: `inductor_q.compile(model)`.

Which module that is depends on who calls the model. A causal language model is compiled whole, with
its loss. Where a trainer has replaced its forward (TRL computes the loss in a function of its own
that Dynamo cannot trace), the decoder inside is. What is compiled is changed in place: a module's
call goes to its compiled form, so names, saved files and `isinstance` stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch.nn.utils.parametrize import is_parametrized

from inductor_q import capture
from inductor_q.capture.live import module_path
from inductor_q.exc import InvalidOptionValue, NoRegion, NotAModule, UnknownRegions
from inductor_q.integrations.checkpointing import prepare_checkpointing
from inductor_q.integrations.cpu_packing import keep_unpacked
from inductor_q.integrations.first_call import prepare_first_call
from inductor_q.integrations.fp8 import prepare_unless_strict
from inductor_q.integrations.gathered import note_states
from inductor_q.integrations.losses import compile_loss, leave_loss
from inductor_q.integrations.mask_parts import (
    make_mask_inside,
    make_mask_outside,
    note_parts,
)
from inductor_q.integrations.neftune import prepare_neftune
from inductor_q.integrations.parameters import prepare_parameters
from inductor_q.integrations.problem_type import classifier_of
from inductor_q.integrations.states import (
    Region,
    States,
    asks_for_graphs,
    region_of,
    set_region,
    tell_of_graphs,
    without_graphs,
)
from inductor_q.loading.merged_experts import stacks_of
from inductor_q.log import warn_once
from inductor_q.options import check_options, current_device

Regions = Literal["auto", "model", "layers"]


def compile(
    model: nn.Module,
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    regions: Regions = "auto",
) -> nn.Module:
    """Compile a model in place with qfuse, and return it.

    A model that is compiled so already stays as it is, under other settings it is compiled anew.
    Gradient checkpointing, DoRA, LoRA on parameters, NEFTune and router logits of experts (where
    the configuration asks for them) are prepared for one graph, and bitsandbytes is kept from
    repacking 4-bit weights on a CPU. A classifier's `problem_type`, where it is None, is written
    before a call and not in it.
    transformers' layers of FP8 checkpoints multiply with their decoded weights from then on
    (`inductor_q.integrations.prepare_fp8`), but where "qfuse.numerics" is "strict". `generate` and
    other calls with a cache of keys and values run in eager mode: they would need a graph for every
    length, unless `inductor_q.integrations.compile_decoding` has compiled their steps for a static
    cache.

    Each state that the model is in (training or not, gradients or not, which of PEFT's adapters are
    active, off or merged) is compiled when it is first met, and never again, however many there
    are. After an adapter was added Dynamo traces each state once more, and Inductor's cache has its
    graph.

    Args:
        model: a transformers model, PEFT's wrapper around one, or any other module.
        options, mode, dynamic: as of `torch.compile(backend="qfuse")`.
        regions: "model" compiles all that can be one graph; "layers" each layer by itself, which
            suits FSDP and compiles sooner; "auto" is "layers" for a model that FSDP has sharded,
            and otherwise "model".

    Raises:
        NotAModule: `model` is something else.
        NoRegion: there are no layers to compile.
        UnknownRegions: `regions` is none of the three.
        UnknownMode, UnknownOption, InvalidOptionValue and the like: as of
            `inductor_q.check_options`, before anything is changed.
        CorruptQuantState: the state of a 4-bit weight lacks a part.
    """
    check_module(model, "inductor_q.compile")
    check_options(options, mode)
    if dynamic not in (True, False, None):
        raise InvalidOptionValue(name="dynamic", value=dynamic, expected="True, False or None")
    found, is_sharded = compiled_regions(model, regions), _is_sharded(model)
    for path, error in capture.damaged(model):
        raise replace(error, what=f"{error.what} of {module_path(path) or 'the model'}")
    prepare_checkpointing(model)
    prepare_neftune(model.modules())
    prepare_parameters(model)
    keep_unpacked(model)
    prepare_first_call(model)
    prepare_unless_strict(model, options)
    _tell_of_frozen_experts(model)
    given = dict(options or {})
    if given and mode:  # torch takes no mode beside options
        given["qfuse.mode"], mode = mode, None
    settings: dict[str, Any] = {"options": given or None, "mode": mode, "dynamic": dynamic}
    base = base_model(model)
    by_layers = found != [_whole(model)]
    if is_sharded or by_layers:
        settings = _of_layers(settings, is_sharded)
        _tell_of_parametrized(found, is_sharded)
    states = States(model, settings)
    leave_loss(base)
    for module in model.modules():
        region = region_of(module)
        if module not in found:
            make_mask_outside(module)
        if region and (module not in found or region.states.settings != settings):
            set_region(module, None)
        elif region:
            region.states.skips_effects |= states.skips_effects
            states = region.states
    knows_masks = by_layers and note_parts(model)
    if found == [model]:  # with its loss
        states.classifier = classifier_of(model, base)
    for module in found:
        if is_sharded:
            note_states(module)
        if is_sharded and knows_masks:
            make_mask_inside(module)
        if region_of(module) is None:
            set_region(module, Region(module, states, shares=by_layers))
    if by_layers and not _is_replaced(base):
        compile_loss(base, states)
    return model


def compiled_regions(model: nn.Module, regions: Regions = "auto") -> list[nn.Module]:
    """Return the modules of `model` that `compile` gives to torch.compile."""
    check_regions(regions)
    base = base_model(model)
    if regions == "layers" or (regions == "auto" and _is_sharded(model)):
        names = set(getattr(base, "_no_split_modules", None) or ())
        layers = [m for m in model.modules() if names & {c.__name__ for c in type(m).__mro__}]
        if not layers:
            raise NoRegion(model=type(base).__name__)
        return layers
    return [_whole(model)]


def _whole(model: nn.Module) -> nn.Module:
    """Return what can be one graph: a model, or what is inside where its forward is replaced."""
    base = base_model(model)
    inside: nn.Module = base.base_model if _is_replaced(base) else model
    return inside


def check_module(model: object, call: str) -> None:
    """Raise NotAModule where `call` got something else."""
    if not isinstance(model, nn.Module):
        raise NotAModule(call=call, found=type(model).__name__)


def check_regions(regions: str) -> None:
    """Raise UnknownRegions where it is none of them."""
    if regions not in get_args(Regions):
        raise UnknownRegions(name=regions, known=get_args(Regions))


def local_device_map() -> dict[str, int | str] | None:
    """Return the `device_map` of `from_pretrained` that puts all of a model on one device.

    It is the GPU of this process by `LOCAL_RANK`, as DDP needs it, or the CPU; None where
    `accelerate launch` says that FSDP or ZeRO-3 shards the model.
    """
    given = os.environ.get
    zero3 = _is_set("ACCELERATE_USE_DEEPSPEED") and given("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3"
    if zero3 or _is_set("ACCELERATE_USE_FSDP"):
        return None
    return {"": int(given("LOCAL_RANK", 0)) if torch.cuda.is_available() else "cpu"}


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes")


def base_model(model: nn.Module) -> Any:
    """Return the model inside of PEFT's wrapper, or the model itself."""
    get: Any = getattr(model, "get_base_model", None)
    return get() if get else model


def _is_replaced(model: nn.Module) -> bool:
    """Whether somebody has replaced the forward of a transformers model.

    accelerate wraps it too, for autocast, and keeps the one before as `_original_forward`.
    """
    held = vars(model)
    forward = held.get("_original_forward", held.get("forward"))
    return (
        hasattr(model, "base_model_prefix")
        and forward is not None
        and getattr(forward, "__func__", forward) is not type(model).forward
    )


def _of_layers(settings: dict[str, Any], is_sharded: bool) -> dict[str, Any]:
    """Switch CUDA graphs off for layers, and warn where the user asks for them."""
    source = asks_for_graphs(settings, current_device())
    if not source:
        return settings
    if is_sharded:
        why = "FSDP gathers weights at another address in each step: each would be recorded anew"
    else:
        why = 'A layer\'s may overwrite what the next layer reads: use regions="model" with them'
    tell_of_graphs("inductor_q.compile", source, why)
    return without_graphs(settings)


def _tell_of_parametrized(layers: list[nn.Module], is_sharded: bool) -> None:
    """Warn of layers that cannot share a graph, since parametrized modules in them are each of a
    class of its own, which Dynamo guards on."""
    held = [[m for m in layer.modules() if is_parametrized(m)] for layer in layers]
    kinds = {tuple(map(type, modules)) for modules in held if modules}
    if len(kinds) < 2:
        return
    ways = [] if is_sharded else ['compile with regions="model"']
    if any(capture.holds_experts(module) for modules in held for module in modules):
        ways.append("inductor_q.experts.quantize(model) takes packed experts over as they are")
    warn_once(
        f"inductor_q.compile: {len(kinds)} kinds of layers share no graph, since "
        "torch.nn.utils.parametrize gives modules in them classes of their own. torch compiles "
        f"{dynamo_config.recompile_limit} graphs of one function (recompile_limit), and layers "
        f"beyond run in eager mode: {' or '.join(ways) or 'remove the parametrizations'}"
    )


def _tell_of_frozen_experts(model: nn.Module) -> None:
    """Warn where no adapter of experts trains, and something else does: whoever freezes a model to
    train adapters of it, does so before it has any."""
    adapters = [part for stack in stacks_of(model) for part in (stack.lora_A, stack.lora_B)]
    trains = [part.requires_grad for part in adapters if part is not None]
    if trains and not any(trains) and any(part.requires_grad for part in model.parameters()):
        warn_once(
            "inductor_q.compile: the adapters of experts are frozen and other parameters train. "
            "Call inductor_q.experts.add_lora after what freezes the model, such as PEFT's "
            "prepare_model_for_kbit_training; or let lora_A and lora_B of each ExpertStack require "
            "gradients before the optimizer is made"
        )


def _is_sharded(model: nn.Module) -> bool:
    """Whether FSDP gathers the weights of the model's layers one after the other."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    kinds = (FSDPModule, FullyShardedDataParallel)
    return any(isinstance(module, kinds) for module in model.modules())
