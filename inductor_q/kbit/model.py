"""Quantize the linear layers of a model, in memory or straight from its checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import Tensor, nn

from inductor_q import ops
from inductor_q.capture import layout, packed_weight
from inductor_q.capture.packed import packed_tensors
from inductor_q.capture.values import dequantize
from inductor_q.exc import NotNames, UnknownLayer
from inductor_q.kbit.allocate import allocate, check_importance, measure, table
from inductor_q.kbit.linear import KBitLinear
from inductor_q.kbit.sources import InMemory, Source
from inductor_q.kbit.tensor import check_codebook, quantize
from inductor_q.kernels.calls import DENSE
from inductor_q.kernels.expert_calls import Stack
from inductor_q.loading.files import Checkpoint, check_not_quantized
from inductor_q.loading.layers import check_some, linear_layers, linear_of, matches, replace_layers
from inductor_q.loading.linear import PackedLinear
from inductor_q.loading.merged_values import dtype_of_values
from inductor_q.loading.merges import forget_packed, merge_by_values, widen
from inductor_q.loading.sources import FromCheckpoint
from inductor_q.ops.quantize_kbit import check_absmax, check_bits


def quantize_model(
    model: nn.Module,
    k: int | Mapping[str, int] | None = None,
    *,
    bits: float | None = None,
    skip: Collection[str] | None = None,
    codebook: Tensor | None = None,
    absmax: str = "e4m4",
    importance: Mapping[str, float] | None = None,
    checkpoint: str | Path | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> nn.Module:
    """Replace every `nn.Linear` of `model` by a `KBitLinear`, one after the other.

    Quantize first, then attach adapters. Everything is checked before the first layer is replaced:
    after an error the model is as it was. Layers that another library or an earlier call has packed
    stay as they are; a warning counts them, and where nothing else is left it is an error.

    Args:
        k: bits of every layer, or by layer name (layers it does not name stay as they are).
        bits: instead of `k`, the average over all layers, scales included, between 2.25 and 5.25:
            K is chosen by layer (`allocate`), and the table printed.
        skip: names or shell patterns of layers to leave alone; by default the one called "lm_head".
        codebook: float32 [2**k], ascending, for every layer; None is the normal-float codebook.
        absmax: "e4m4" or "fp16".
        importance: with `bits`, factors of the layers' squared errors, by name; 1 by default.
        checkpoint: a safetensors file, an index of shards or a folder with either. `model` then
            only says what there is (make it under `meta_parameters()`): weights are read one at a
            time, the rest is loaded in the model's dtypes, and the whole model is never held
            unquantized.
        device: where each layer is quantized and stays; by default where its weight is, and the CPU
            with a checkpoint.
        progress: show progress and the table on stderr.

    Returns:
        The model, changed in place; a `KBitLinear` where `model` is itself a linear layer.

    Raises:
        UnsupportedBits, UnknownAbsmax, WrongCodebook, WrongBudget, UnknownLayer, NotNames: the
            arguments.
        NothingToQuantize: no layer is left to quantize; the error says what was found instead.
        NoValues: a weight is on the meta device and there is no checkpoint.
        AlreadyQuantized: the checkpoint's config.json says that its weights are quantized.
        NotFinite, ScaleOutOfRange: a weight, by name, that cannot be quantized.
        WrongCheckpoint: it lacks tensors of the model, has them in other shapes, or is damaged.
    """
    if (k is None) == (bits is None):
        raise TypeError("give k or bits, and one of them only")
    if importance is not None and bits is None:
        raise TypeError("importance goes with bits: it weighs the choice of K by layer")
    check_absmax(absmax)
    if checkpoint is not None:
        check_not_quantized(checkpoint)
    layers = linear_layers(model, skip_patterns(model, skip))
    check_some(layers, model, told=not isinstance(k, Mapping))
    source: Source
    if checkpoint is None:
        source = InMemory(model, layers, device)
    else:
        source = FromCheckpoint(model, Checkpoint(checkpoint), device or "cpu")
    with progress_bars(progress) as bars:
        if bits is None:
            assert k is not None
            ks = dict.fromkeys(layers, k) if isinstance(k, int) else dict(k)
            _check_ks(ks, layers, codebook)
            source.check(ks, absmax)
        else:
            ks = _allocate(source, layers, bits, absmax, importance or {}, bars)
            _check_ks(ks, layers, codebook)
        for name in bars.track(ks, description="quantizing"):
            what = f"weight of {name or 'the layer'}"
            weight = quantize(source.weight(name), ks[name], codebook, absmax, what=what)
            weight = replace(weight, dtype=layers[name].weight.dtype)
            layer = KBitLinear(weight, layers[name].bias)
            if layer.bias is None or not layer.bias.is_meta:  # a checkpoint fills a meta bias later
                layer = layer.to(weight.operands[0].device)
            source.put(name, layer)
        return source.finish()


def dequantize_model(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Replace every `KBitLinear` of `model` by an `nn.Linear` of the same values.

    So it does with every other `PackedLinear`, of a checkpoint as it ships, with transformers'
    `FP8Linear`, and with layers whose weight is a tensor subclass of torchao's. Packed experts
    become parameters, or dense stacks where they have adapters. Use this to export, to compare, or
    to merge an adapter that PEFT cannot merge into packed layers. `dtype` is by default that of the
    original, or of the last cast of the layer, and float32 where the model's embedding is; for an
    `FP8Linear` and for experts it is that of the embedding. It changes the model in place and
    returns it, as `quantize_model` does; with torchao's weights go transformers' marks of them.
    Where adapters are merged, nothing packed is kept to be put back: PEFT subtracts them then.

    Raises:
        UnreadWeight: a weight of torchao's that none of our formats describes. Nothing has changed.
    """
    of_model = dtype_of_values(model)
    widen(model)
    plain, unmarked = {}, False
    for name, layer in model.named_modules():
        if isinstance(layer, PackedLinear):
            plain[name] = layer.decoded(dtype)
        elif isinstance(layer, nn.Linear):
            held = packed_weight(layer, "weight")
            if held is not None and held.quantizes_input and held.read is not None:
                values = ops.dequantize(*held.read(), dtype or of_model)
                plain[name] = linear_of(values, layer.bias)
            elif layout(layer.weight) is not None:
                values = dequantize(layer.weight, dtype=dtype)
                plain[name] = linear_of(values, layer.bias)
                unmarked = True
    for layer in model.modules():
        for name, child in list(layer.named_children()):
            stack: Any = child  # an `ExpertStack`, if one: its package imports this one
            if isinstance(child, Stack) and stack.format != DENSE:
                stack.unpack(layer, name, dtype or of_model)
    forget_packed(model)
    model = replace_layers(model, plain)
    for new in plain.values():
        merge_by_values(new, None)  # PEFT's layer above it may be one for packed weights
    if unmarked and not any(any(packed_tensors(layer)) for layer in model.modules()):
        for module in model.modules():  # PEFT's are around transformers' model
            quantizer: Any = vars(module).get("hf_quantizer")
            if quantizer is not None and hasattr(module, "config"):
                quantizer.remove_quantization_config(module)
            elif quantizer is not None:
                del module.hf_quantizer
    return model


def progress_bars(shown: bool) -> Progress:
    """Make bars on stderr, which say how many layers are done and how long the rest will take."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), disable=not shown)


def skip_patterns(model: nn.Module, skip: Collection[str] | None) -> Collection[str]:
    """Return what to skip: by default the head, whose errors reach the loss directly."""
    if isinstance(skip, str):
        raise NotNames(argument="skip", value=skip)
    if skip is not None:
        return skip
    linears = (name for name, m in model.named_modules() if type(m) is nn.Linear)
    return ("lm_head",) if any(matches(name, "lm_head") for name in linears) else ()


def _check_ks(
    ks: Mapping[str, int], layers: Mapping[str, nn.Linear], codebook: Tensor | None
) -> None:
    for name, k in ks.items():
        if name not in layers:
            raise UnknownLayer(name=name, known=tuple(layers), source="k")
        check_bits(k)
        if codebook is not None:
            check_codebook(codebook, k)


def _allocate(
    source: Source,
    layers: Mapping[str, nn.Linear],
    bits: float,
    absmax: str,
    importance: Mapping[str, float],
    bars: Progress,
) -> dict[str, int]:
    check_importance(importance, layers)
    errors = [
        measure(name, source.weight(name), absmax, importance.get(name, 1.0))
        for name in bars.track(layers, description="measuring")
    ]
    ks = allocate(errors, bits)
    bars.print(table(errors, ks))
    return ks
