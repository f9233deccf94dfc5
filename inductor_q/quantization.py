"""One way to ask for quantized linear layers, whichever library writes the format.

Layers are those of the library: bitsandbytes' `Linear4bit` and `Linear8bitLt`, linear layers with
weights of torchao's, `KBitLinear`; and `PackedLinear` for formats that have none. No library is
imported before its format is asked for.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inductor_q import capture
from inductor_q.asked import (
    ANOTHER,
    LEAVE_OUT,
    OF_TORCHAO_FORMATS,
    ON_A_GPU,
    dtypes_of,
    left_alone,
    resolve,
)
from inductor_q.capture.packed import packed_tensors
from inductor_q.exc import MissingExtra, NoQuantizer, NotAModel, NoValues, WrongScheme
from inductor_q.formats import FORMATS
from inductor_q.formats.aliases import ALIASES
from inductor_q.formats.bnb import BNB_QUANT_TYPES, INT8
from inductor_q.formats.encode import ENCODED, encode
from inductor_q.log import warn_once
from inductor_q.marks import mark

#: Makes a quantized layer of a linear layer, whose weight lies on its device; errors call that
#: weight by the text beside it.
Make = Callable[[nn.Linear, str], nn.Module]


def quantize(
    model: nn.Module | Any,
    to: Any,
    *,
    skip: Collection[str] | None = None,
    checkpoint: str | Path | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> nn.Module:
    """Replace every `nn.Linear` of `model` by a layer of the library that writes the format.

    What is asked for is checked before a weight is read, and in memory whether the library takes
    every shape of the model's, before a layer is replaced. Quantize first, then attach adapters.
    Layers of bitsandbytes and weights of torchao are noted in the configuration of a model of
    transformers, so that `from_pretrained` loads what its `save_pretrained` writes, and PEFT merges
    adapters into them. For that `merge` and `unmerge` of PEFT's LoRA layers are replaced in the
    process; over layers that were not packed here they do what PEFT's own do.

    Args:
        model: a model, a linear layer, or a causal language model's configuration of transformers'
            beside `checkpoint`: its model is made without memory, of a copy of it, in its dtype
            (bfloat16 if it has none) and, as by `from_pretrained`, for evaluation.
        to: a format's name (`inductor_q.FORMATS`) or a short one: "nf4", "fp4", "int8", "llm_int8",
            "fp8_row", "fp8_tensor", "fp8_128x128", "int4", "int4_g64", "nvfp4", "mxfp4", "mxfp8",
            "kbit4". Or a mapping with one key: `{"bnb": {"quant_type": "nf4", "blocksize": 64,
            "nested": True}}`, where `quant_storage` (torch.bfloat16 for FSDP2) and `compute_dtype`
            may be said too, `{"torchao": {"format": "int4", "group_size": 128}}` or `{"torchao":
            {"config": ...}}`, `{"kbit": {"k": 4}}`, `{"fp8": {"of": "row"}}`, `{"mxfp4": {}}`.
            torchao's "nf4" is its `NF4Tensor`; any other is bitsandbytes'. Or a configuration of
            torchao's that quantizes weights alone, or transformers' `BitsAndBytesConfig`,
            `TorchAoConfig` or, for "fp8_128x128", `FineGrainedFP8Config()`, whose lists of
            modules to leave alone count as `skip`, by transformers' rules. Inductor's settings
            stay as they are, also where `set_inductor_config` of torchao's is true.
        skip: names or shell patterns of layers to leave alone; by default the one called "lm_head".
        checkpoint: a safetensors file, an index of shards or a folder with either; `model` then
            only says what there is, and is never held unquantized (`kbit.meta_parameters`).
        device: where layers are quantized and stay; by default where each weight is, and the CPU
            with a checkpoint.
        progress: show progress on stderr.

    Returns:
        The model, changed in place, or the new layer where `model` is a linear layer itself.

    Raises:
        NotNames: `skip` is a text.
        NotAModel: `model` is neither a module nor such a configuration.
        WrongScheme, UnknownFormat, NoQuantizer, MissingExtra: what is asked for, or a layer whose
            shape the library does not take.
        NoValues: a weight is on the meta device, or a configuration was given, and there is no
            checkpoint.
        NotFinite: a weight, by name; nothing is changed then, nor for the next.
        ScaleOutOfRange: a weight, by name, that has no K-bit codes.
        UnknownLayer, NothingToQuantize: there is no such layer, or none that is left.
        AlreadyQuantized, WrongCheckpoint: the checkpoint.
    """
    from inductor_q.kbit.model import progress_bars, skip_patterns
    from inductor_q.kbit.sources import InMemory, Source
    from inductor_q.loading.files import Checkpoint, check_not_quantized
    from inductor_q.loading.layers import check_some, linear_layers, linear_of
    from inductor_q.loading.sources import FromCheckpoint

    found = resolve(to)
    make, config = _maker(to, found)
    if checkpoint is not None:
        check_not_quantized(checkpoint)
    if not isinstance(model, nn.Module):
        model = _empty(model, checkpoint)
    linears = (name for name, module in model.named_modules() if type(module) is nn.Linear)
    left = left_alone(to, linears)
    patterns = left if skip is None and left is not None else skip_patterns(model, skip)
    layers = linear_layers(model, patterns)
    layers = {name: layer for name, layer in layers.items() if name not in (left or ())}
    check_some(layers, model)
    source: Source = (
        InMemory(model, layers, device)
        if checkpoint is None
        else FromCheckpoint(model, Checkpoint(checkpoint), device or "cpu")
    )

    def made(name: str, bias: nn.Parameter | None) -> nn.Module:
        what, weight = f"weight of {name or 'the layer'}", source.weight(name)
        layer = make(linear_of(weight.to(layers[name].weight.dtype), bias), what)
        _check_read(to, layer, what)
        return layer

    if checkpoint is None:  # where layers change one by one, one of each kind is tried before
        weights = ((name, layer.weight) for name, layer in layers.items())
        kinds = {(w.shape, w.dtype, w.device): name for name, w in weights}
        for name in kinds.values():
            made(name, None)
    is_kbit = isinstance(found, str) and found.startswith("kbit")
    source.check(layers, str(found).partition("_")[2] if is_kbit else None)
    with progress_bars(progress) as bars:
        for name in bars.track(list(layers), description="quantizing"):
            source.put(name, made(name, layers[name].bias))
    model = source.finish()
    mark(model, list(layers), config)
    _tell_of_experts(model, to, found)
    return model


def _tell_of_experts(model: nn.Module, to: Any, found: Any) -> None:
    """Warn of fused experts, which are no `nn.Linear`."""
    left = [
        name
        for name, module in model.named_modules()
        if capture.holds_experts(module)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 3 and parameter.is_floating_point() and parameter.itemsize > 1
    ]
    if left:
        from inductor_q.experts.packing import QUANTIZERS, SHORT

        asked = to if isinstance(to, str) else found
        is_written = asked in [*SHORT, *(fmt.name for fmt in QUANTIZERS)]
        way = f"(model, {asked!r}) packs them" if is_written else f" packs to {', '.join(SHORT)}"
        warn_once(
            f"inductor_q.quantize: the fused experts of {len({*left})} layers stay in 16 bits; "
            f"inductor_q.experts.quantize{way}"
        )


def _empty(config: Any, checkpoint: str | Path | None) -> nn.Module:
    """Make the causal language model of a configuration, with its parameters on meta.

    The model has a copy of the configuration, which `mark` writes to: another model may be made of
    the one that was given.
    """
    from inductor_q.loading.files import meta_parameters

    name = type(config).__name__
    if not hasattr(config, "model_type"):
        raise NotAModel(found=name)
    if checkpoint is None:
        raise NoValues(what=f"the model that a {name} describes")
    from transformers import AutoModelForCausalLM

    with meta_parameters():
        dtype = getattr(config, "dtype", None) or torch.bfloat16
        model: nn.Module = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    return model.eval()


def _maker(to: Any, found: Any) -> tuple[Make, Any]:
    """Return what makes layers of what `to` asks for and is resolved to, and torchao's
    configuration where torchao packs the weights; import its library."""
    config = found if not isinstance(found, str) else _torchao_config(found)
    if config is None:
        return _other_maker(to, found), None
    if getattr(config, "set_inductor_config", False):
        # With it, each call turns on coordinate descent tuning for the process, and a first step
        # takes many times as long.
        config = dataclasses.replace(config, set_inductor_config=False)
    return functools.partial(_torchao, to, config), config


def _other_maker(to: Any, found: str) -> Make:
    fmt = FORMATS[found]
    if found == INT8.name:
        if threshold := getattr(to, "llm_int8_threshold", 0.0):
            warn_once(
                f"llm_int8_threshold={threshold} becomes 0.0: how many outliers a batch has "
                "depends on the data, and breaks graphs"
            )
        return functools.partial(_bnb_8bit, _bitsandbytes(found))
    if fmt.codec in BNB_QUANT_TYPES.values() and fmt.blockwise is not None:
        return functools.partial(_bnb_4bit, _bitsandbytes(found), found, dtypes_of(to))
    if found.startswith("kbit"):
        return functools.partial(_kbit, int(found[4]), found.partition("_")[2])
    if fmt in ENCODED:
        return functools.partial(_own, found)
    raise NoQuantizer(name=found, what="linear layers", known=tuple(ALIASES))


def _bitsandbytes(name: str) -> Any:
    try:
        import bitsandbytes
    except ImportError:
        raise MissingExtra(package="bitsandbytes", extra="bnb", feature=name) from None
    return bitsandbytes.nn


def _bnb_4bit(
    library: Any, name: str, dtypes: Mapping[str, torch.dtype], linear: nn.Linear, what: str
) -> nn.Module:
    scale, weight = FORMATS[name].blockwise, linear.weight
    assert scale is not None, f"{name=}"
    nested, kind = scale.outer > 0, name.partition("_")[0]
    how: dict[str, Any] = {"compress_statistics": nested, "quant_type": kind}
    how["quant_storage"] = dtypes.get("quant_storage", torch.uint8)
    compute_dtype = dtypes.get("compute_dtype", weight.dtype)
    with torch.device("meta"):
        sizes = (linear.in_features, linear.out_features)
        new = library.Linear4bit(*sizes, bias=False, compute_dtype=compute_dtype, **how)
    packed = library.Params4bit(
        weight.detach(), requires_grad=False, blocksize=scale.block, module=new, **how
    )
    new.weight, new.bias = packed.to(weight.device), linear.bias
    return _frozen(new)


def _bnb_8bit(library: Any, linear: nn.Linear, what: str) -> nn.Module:
    """Quantize without outliers, whose number depends on the data and breaks graphs.

    Moving an `Int8Params` to a device quantizes it only where it comes from a CPU, so a weight that
    lies on a GPU is quantized here, by the function that the move calls.
    """
    from bitsandbytes.functional import int8_vectorwise_quant

    with torch.device("meta"):
        sizes = (linear.in_features, linear.out_features)
        new = library.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False, threshold=0.0)
    codes, scales, _ = int8_vectorwise_quant(linear.weight.detach().contiguous().half())
    how = {"requires_grad": False, "has_fp16_weights": False}
    new.weight, new.bias = library.Int8Params(codes, CB=codes, SCB=scales, **how), linear.bias
    return _frozen(new)


def _kbit(k: int, absmax: str, linear: nn.Linear, what: str) -> nn.Module:
    from inductor_q import kbit

    weight = kbit.quantize(linear.weight, k, absmax=absmax, what=what)
    layer: nn.Module = kbit.KBitLinear(weight, linear.bias)
    return layer


def _own(name: str, linear: nn.Linear, what: str) -> nn.Module:
    """Quantize to a format that no library has a layer for."""
    from inductor_q.loading.linear import PackedLinear

    fmt, weight = FORMATS[name], linear.weight
    operands = dict(zip(fmt.operands, encode(weight, fmt, what), strict=True))
    shape = (linear.out_features, linear.in_features)
    bias: Any = linear.bias
    return _frozen(PackedLinear(operands, name, shape, bias, dtype=weight.dtype))


def _torchao(to: Any, config: Any, linear: nn.Linear, what: str) -> nn.Module:
    """Quantize by torchao. Shapes that it does not take are errors of several kinds there, and of
    one here."""
    from torchao.quantization import quantize_

    holder = nn.Sequential(linear)
    try:
        quantize_(holder, config)
    except torch.OutOfMemoryError:
        raise
    except ImportError as error:
        problem = f"torchao lacks what packs it ({error}). Install that, or ask for another format"
        raise WrongScheme(asked=to, problem=problem) from error
    except (AssertionError, RuntimeError, ValueError) as error:
        problem = f"torchao does not take the {what} ({error}). {LEAVE_OUT}"
        if hasattr(config, "int4_packing_format") and linear.weight.device.type == "cpu":
            problem = f"torchao packs these codes on a GPU alone ({error}). {ON_A_GPU}"
        raise WrongScheme(asked=to, problem=problem) from error
    return _frozen(holder[0])


def _torchao_config(name: str) -> Any:
    """Return torchao's configuration that writes a format, or None."""
    if not OF_TORCHAO_FORMATS.fullmatch(name):
        return None
    family, _, of = name.rpartition("_")
    try:
        from torchao import quantization as ao
    except ImportError:
        raise MissingExtra(package="torchao", extra="torchao", feature=name) from None
    if family == "nvfp4":
        from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig

        return NVFP4WeightOnlyConfig()
    if family == "nf4_tensor":
        from torchao.prototype._nf4tensor_api import NF4WeightOnlyConfig

        return NF4WeightOnlyConfig()
    if family.startswith("int4"):
        layout = {"int4_tiles": "tile_packed_to_4d", "int4_plain": "plain"}[family]
        return ao.Int4WeightOnlyConfig(group_size=int(of[1:]), int4_packing_format=layout)
    if of in ("row", "tensor"):
        shared = ao.PerRow() if of == "row" else ao.PerTensor()
    else:
        shared = ao.PerGroup(int(of[1:]))
    if family == "int8":
        return ao.Int8WeightOnlyConfig(granularity=shared)
    dtype = torch.float8_e5m2 if family == "fp8_e5m2" else torch.float8_e4m3fn
    return ao.Float8WeightOnlyConfig(weight_dtype=dtype, granularity=shared)


def _frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def _check_read(to: Any, layer: nn.Module, what: str) -> None:
    """Raise where a library makes a weight that no pass reads, or leaves it as it is."""
    if not any(packed_tensors(layer)):
        problem = f"the library leaves the {what} as it is, unpacked. {LEAVE_OUT}"
        raise WrongScheme(asked=to, problem=problem)
    weight = layer._parameters.get("weight")
    layout = None if weight is None else capture.layout(weight)
    if layout is not None and layout.reason:
        raise WrongScheme(asked=to, problem=f"{layout.reason}. {ANOTHER}")
