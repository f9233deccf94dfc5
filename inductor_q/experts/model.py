"""Quantize a model's experts in place and give them adapters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inductor_q.asked import dtypes_of, left_alone
from inductor_q.capture import holds_experts, packed_weight
from inductor_q.capture.packed import holds_codes
from inductor_q.exc import AlreadyAdapted, AlreadyQuantized, NothingToQuantize, WrongScheme
from inductor_q.experts.forward import IMPLEMENTATION, register
from inductor_q.experts.modules import (
    PROJECTIONS,
    as_stack,
    check_not_merged,
    check_not_wrapped,
    expert_layers,
    packed_experts,
    path_of,
    projections,
    put_stack,
    take_over,
)
from inductor_q.experts.packing import check_cut, check_written, format_of_stacks, pack
from inductor_q.experts.stack import ExpertStack
from inductor_q.formats import get_format
from inductor_q.kernels.calls import DENSE
from inductor_q.loading.files import Checkpoint, check_not_quantized
from inductor_q.loading.merged_experts import forget_expert, merge_experts
from inductor_q.loading.merges import mend_merges
from inductor_q.loading.sources import FromCheckpoint
from inductor_q.log import log


def quantize(
    model: nn.Module,
    format: Any = "nf4_b64",
    *,
    targets: Collection[str] = PROJECTIONS,
    weights: Callable[[str, nn.Parameter], Tensor] | None = None,
    checkpoint: str | Path | None = None,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Pack the fused experts of `model` in place, one projection at a time, and switch to "qfuse".

    A projection's weights are freed before the next one is packed. Experts that bitsandbytes'
    `replace_parameter_4bit` has packed, and those in transformers' `Mxfp4GptOssExperts` and
    `FP8Experts`, are taken over as they are; a warning says so where that is another format.

    Args:
        model: a model of transformers (v5), or a PEFT model around one.
        format: whatever `inductor_q.quantize` takes: a name in `inductor_q.FORMATS`, such as
            "nf4_b64", a short one such as "nf4", "kbit4" or "mxfp4", a mapping such as `{"bnb":
            {"blocksize": 128}}`, or transformers' `BitsAndBytesConfig`. "nvfp4" is `nvfp4_rows`
            here, with a scale of scales for each row; "dense" keeps the values. torchao packs no
            stacks. Experts multiply in the dtype of their input, whatever `compute_dtype` says.
        targets: some of "gate_up_proj", "up_proj", "down_proj".
        weights: a function (name, parameter) -> its values, for a model with parameters on the
            meta device (`inductor_q.kbit.meta_parameters`). It is called for one projection at a
            time, so the whole model is never held unpacked. By default each parameter's own values.
        checkpoint: a safetensors file, an index of shards or a folder with either, instead of
            `weights`: the experts are read from it one projection at a time, and then the rest; the
            model changes when everything has been read.
        device: where to pack, and where the packed weights stay; by default where each weight is.

    Returns:
        The model.

    Raises:
        NoExperts, UnknownProjection, UnknownFormat, MissingExtra, NotFinite.
        WrongScheme: what is asked for is no format, or not one of stacks, or leaves experts alone;
            or two experts would share a scale. Nothing is changed then, nor for the next.
        NoQuantizer: no stack can be quantized to the format, and some projection is not in it.
        AlreadyQuantized: the checkpoint's config.json says that its weights are quantized, or a
            parameter holds codes. Nor is anything changed then.
        UnreadExperts: transformers has swizzled experts in MXFP4, not loaded them, or has them in
            FP8 in other blocks. Nor is anything changed then.
        NothingToQuantize: every projection is packed by an earlier call, in another format.
        WrongCheckpoint: it lacks tensors of the model, or has them in other shapes.
        StillMerged: PEFT's `merge_adapter` has merged adapters into a target, where there are
            `weights`, or into any expert, where there is a `checkpoint`, which is read as a whole.
            Nothing is changed then.
        AdaptedByPeft: PEFT has an adapter over a target (`target_parameters`). Nothing is changed
            then.
    """
    asked, format = format, format_of_stacks(format)  # an unknown one changes nothing
    _check_settings(asked, model)
    if checkpoint is not None:  # which has not what was merged, and is read as a whole
        check_not_merged(model, "quantize(checkpoint=...)")
    elif weights is not None:
        check_not_merged(model, "quantize(weights=...)", targets)
    check_not_wrapped(model, "quantize", targets)
    taken = take_over(model)
    _check_not_packed(model, format, targets, taken)  # nor does a model with nothing to pack
    for layer in expert_layers(model).values():
        for name in projections(layer, targets):
            held = _values(layer, name)
            if held is not None and format != DENSE:
                check_written(format)
                check_cut(format, _lying(held, format, layer).shape)
    source = None
    if checkpoint is not None:
        check_not_quantized(checkpoint)
        source = FromCheckpoint(model, Checkpoint(checkpoint), device or "cpu")
    else:
        use_qfuse(model)  # so that it computes also where packing fails at a later projection
    left: Counter[str] = Counter()
    for layer_name, layer in expert_layers(model).items():
        for name in projections(layer, targets):
            weight = _values(layer, name)
            if weight is None:
                other = as_stack(layer, name).format
                left[other] += other != format
            elif source is not None:
                found = _pack(source.values(f"{layer_name}.{name}", weight), format, layer)
                put = partial(put_stack, layer, name, **found)
                of_stack = ".weight" if name in layer._modules else ""
                source.change(f"{layer_name}.{name}{of_stack}", put)  # when all have been read
            else:
                values = weights(f"{layer_name}.{name}", weight) if weights else weight.detach()
                found = _pack(values.to(device or values.device), format, layer)
                put_stack(layer, name, **found)
                forget_expert(layer, name)  # what was merged is in the weight for good
    for other, count in (+left).items():  # without those that are in it
        log.warning(f"{count} projections of experts are packed already and stay as {other}")
    if source is not None:
        source.finish()
    return use_qfuse(model)


def _check_settings(to: Any, model: nn.Module) -> None:
    """Refuse settings of linear layers that stacks cannot have."""
    storage = dtypes_of(to).get("quant_storage", torch.uint8)
    if storage != torch.uint8:
        problem = (
            f"quant_storage={storage}, where stacks keep codes in bytes. Leave it out; "
            "inductor_q.experts.shard leaves each rank its share of the experts"
        )
        raise WrongScheme(asked=to, problem=problem)
    layers = (name for name, module in model.named_modules() if holds_experts(module))
    if left := left_alone(to, layers):
        problem = (
            f"it leaves {left[0]} alone, and all layers of experts are packed. Leave that entry "
            "out, or say which projections of each by targets=[...]"
        )
        raise WrongScheme(asked=to, problem=problem)


def _pack(values: Tensor, format: str, layer: Any) -> dict[str, Any]:
    """Pack a projection's values; return what `put_stack` takes of them."""
    lying = _lying(values, format, layer)
    operands, transposed = pack(lying, format), layer.is_transposed and lying is values
    return {"operands": operands, "format": format, "shape": lying.shape, "transposed": transposed}


def _lying(values: Tensor, format: str, layer: Any) -> Tensor:
    """Return a projection's values as they are packed: a row is what makes an output, where the
    columns of a row share scales."""
    by_rows = format != DENSE and get_format(format).by_rows
    return values.mT if layer.is_transposed and by_rows else values


def _values(layer: Any, name: str) -> nn.Parameter | None:
    """Return the parameter that holds a projection's values, or would; None where it is packed."""
    held = layer._modules.get(name)
    if isinstance(held, ExpertStack):
        return held.get_parameter("weight") if held.format == DENSE else None
    weight: nn.Parameter | None = layer._parameters.get(name)
    return weight if packed_experts(layer, name) is None else None


def _check_not_packed(model: nn.Module, format: str, targets: Collection[str], taken: bool) -> None:
    """Refuse codes of other libraries, and a model that has been packed in another format, unless
    it has just been taken over so."""
    stacked = []
    for layer_name, layer in expert_layers(model).items():
        for name in projections(layer, targets):
            held = layer._modules.get(name)
            if isinstance(held, ExpertStack):
                stacked.append(held.format)
                continue
            stacked.append(DENSE)
            if found := _foreign(layer, name):
                raise AlreadyQuantized(
                    what=f"{layer_name}.{name}",
                    found=found,
                    remedy=(
                        "Load the model dequantized (Mxfp4Config(dequantize=True), "
                        "FineGrainedFP8Config(dequantize=True)), or a checkpoint in 16 bits"
                    ),
                )
    if stacked and not taken and DENSE not in stacked and format not in stacked:
        raise NothingToQuantize(
            model=type(model).__name__,
            found=(
                f"its experts are packed as {', '.join(sorted(set(stacked)))} already. Make the "
                f"model anew, with its 16-bit weights, for {format}"
            ),
        )


def _foreign(layer: nn.Module, name: str) -> str:
    """Describe what a projection holds that we neither read nor quantize; "" for values, and for
    ours.
    """
    packed, weight = packed_weight(layer, name), layer._parameters.get(name)
    if packed is not None:
        return packed.reason
    return f"it holds {weight.dtype}" if weight is not None and holds_codes(weight) else ""


def add_lora(
    model: nn.Module,
    r: int = 16,
    alpha: float = 16,
    targets: Collection[str] = PROJECTIONS,
    *,
    rslora: bool = False,
    dtype: torch.dtype = torch.float32,
) -> list[nn.Parameter]:
    """Give every expert of the targeted projections an adapter `alpha / r * B_e A_e`.

    PEFT's initialization gives A, and B is zero, so the model computes what it did. The experts'
    own weights are frozen. Adapters are parameters of the model like any other: they move, cast and
    save with it.

    Args:
        model: a model of transformers (v5), dense or quantized, or a PEFT model around one.
        r, alpha, rslora: as in PEFT's `LoraConfig`; rslora scales with `alpha / sqrt(r)`.
        targets: some of "gate_up_proj", "up_proj", "down_proj".
        dtype: the dtype of the adapters; they compute in that of the activations.

    Returns:
        The new parameters, for an optimizer.

    Raises:
        NoExperts, UnknownProjection, UnreadExperts.
        AlreadyAdapted: one of them has an adapter. Nothing is changed then, nor for the next.
        StillMerged: PEFT's `merge_adapter` has merged adapters of experts.
        AdaptedByPeft: PEFT has an adapter over a target (`target_parameters`).
    """
    check_not_merged(model, "add_lora")
    check_not_wrapped(model, "add_lora", targets)
    take_over(model)
    for layer_name, layer in expert_layers(model).items():
        for name in projections(layer, targets):
            held = layer._modules.get(name)
            if isinstance(held, ExpertStack) and held.lora_A is not None:
                raise AlreadyAdapted(what=path_of(layer_name, name))
    added: list[nn.Parameter] = []
    for layer in expert_layers(model).values():
        for name in projections(layer, targets):
            stack = as_stack(layer, name)
            a = torch.empty((stack.num_experts, r, stack.in_features), dtype=dtype)
            nn.init.kaiming_uniform_(a.view(-1, stack.in_features), a=math.sqrt(5))
            b = a.new_zeros(stack.num_experts, stack.out_features, r)
            added += attach(stack, a, b, alpha / (math.sqrt(r) if rslora else r))
    use_qfuse(model)
    return added


def merge_lora(model: nn.Module, *, safe: bool = False) -> nn.Module:
    """Merge the experts' adapters into their weights, for good.

    PEFT's `merge_adapter` and `merge_and_unload` do so with all adapters of a model of theirs; this
    is for a model whose experts alone have adapters. A stack becomes an ordinary parameter, of the
    decoded weight and the adapter added in float32 and rounded once to the dtype of the embedding;
    a dense one keeps its dtype. Stacks without an adapter stay as they are. What
    `merge_adapter` has merged stays so: nothing is kept that could come out again.

    Args:
        safe: whether a sum that is not finite in the dtype it gets is a ValueError, before anything
            is changed.

    Returns:
        The model, changed in place.

    Raises:
        CannotMerge: the experts are sharded, by `shard` or FSDP2. Nothing is changed then.
    """
    merge_experts(model, keep=False, safe=safe)
    return model


def attach(stack: ExpertStack, a: Tensor, b: Tensor, scaling: float) -> list[nn.Parameter]:
    """Make `a` and `b` the trained adapter of a stack whose own weights are frozen."""
    for weight in stack.operands:
        weight.requires_grad_(False)
    weight = stack.operands[0]
    device = a.device if weight.is_meta else weight.device  # of a model to be read from a file
    stack.lora_A, stack.lora_B = nn.Parameter(a.to(device)), nn.Parameter(b.to(device))
    stack.scaling = scaling
    return [stack.lora_A, stack.lora_B]


def use_qfuse(model: nn.Module) -> nn.Module:
    """Compute the experts of `model` with scatter2scatter: packed, dense, with adapters or not.

    gpt-oss's in transformers' `Mxfp4GptOssExperts` become stacks of the same bytes. `FP8Experts`,
    whose own products quantize their input to FP8 as well, multiply with their decoded weights.

    Raises:
        NoExperts.
        UnreadExperts: transformers has swizzled them, not loaded them, or has them in FP8 with
            other scales than for blocks of 128 x 128.
    """
    register()
    mend_merges()
    take_over(model)
    for layer in expert_layers(model).values():
        layer.config._experts_implementation = IMPLEMENTATION
    return model


def stacks(model: nn.Module) -> Iterator[tuple[str, ExpertStack]]:
    """Return every projection that is an `ExpertStack`, by name."""
    for name, module in model.named_modules():
        if isinstance(module, ExpertStack):
            yield name, module
