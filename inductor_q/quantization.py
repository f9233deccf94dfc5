"""One way to ask for quantized linear layers, whichever library writes the format.

Layers are those of the library: bitsandbytes' `Linear4bit` and `Linear8bitLt`, linear layers with
weights of torchao's, `KBitLinear`. No library is imported before its format is asked for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inductor_q import capture
from inductor_q.exc import MissingExtra, NoQuantizer, UnknownFormat, WrongScheme
from inductor_q.formats import FORMATS
from inductor_q.formats.bnb import BLOCKSIZES, BNB_QUANT_TYPES, INT8, bnb_format_name
from inductor_q.formats.kbit import KBIT_SCALES, KBITS, kbit_format_name
from inductor_q.log import warn_once

#: Short names, each for what its library takes by default.
ALIASES = {
    "nf4": "nf4_b64_nested",
    "fp4": "fp4_b64_nested",
    "int8": "int8_row",
    "llm_int8": INT8.name,
    "fp8": "fp8_e4m3_row",
    "fp8_row": "fp8_e4m3_row",
    "fp8_tensor": "fp8_e4m3_tensor",
    "nvfp4": "nvfp4_tiles",
    **{f"int4_g{group}": f"int4_tiles_g{group}" for group in (32, 64, 128, 256)},
    **{f"kbit{k}": kbit_format_name(k, "e4m4") for k in KBITS},
}

#: What a mapping may ask, and with which fields.
FIELDS = {
    "bnb": ("quant_type", "blocksize", "nested"),
    "torchao": ("format", "config"),
    "kbit": ("k", "absmax"),
    "fp8": ("of",),
}

#: Spellings of transformers' first configurations.
DEPRECATED = {"load_in_4bit": "nf4", "load_in_8bit": "llm_int8"}

#: Makes a quantized layer of a linear layer, whose weight lies on its device.
Make = Callable[[nn.Linear], nn.Module]


def quantize(
    model: nn.Module,
    to: Any,
    *,
    skip: Collection[str] | None = None,
    checkpoint: str | Path | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> nn.Module:
    """Replace every `nn.Linear` of `model` by a layer of the library that writes the format.

    What is asked for is checked before a weight is read. Quantize first, then attach adapters.
    Layers of bitsandbytes are noted in the configuration of a model of transformers, so that
    `from_pretrained` loads what its `save_pretrained` writes.

    Args:
        to: a format's name (`inductor_q.FORMATS`) or a short one: "nf4", "fp4", "int8", "llm_int8",
            "fp8_row", "fp8_tensor", "int4_g128", "nvfp4", "kbit4". Or a mapping with one key:
            `{"bnb": {"quant_type": "nf4", "blocksize": 64, "nested": True}}`, `{"torchao":
            {"config": ...}}`, `{"kbit": {"k": 4}}`, `{"fp8": {"of": "row"}}`. Or a configuration
            of torchao's, or transformers' `BitsAndBytesConfig` or `TorchAoConfig`. Inductor's
            settings stay as they are, also where `set_inductor_config` of torchao's is true.
        skip: names or shell patterns of layers to leave alone; by default the one called "lm_head".
        checkpoint: a safetensors file, an index of shards or a folder with either; `model` then
            only says what there is, and is never held unquantized (`kbit.meta_parameters`).
        device: where layers are quantized and stay; by default where each weight is, and the CPU
            with a checkpoint.
        progress: show progress on stderr.

    Returns:
        The model, changed in place, or the new layer where `model` is a linear layer itself.

    Raises:
        WrongScheme, UnknownFormat, NoQuantizer, MissingExtra: what is asked for.
        UnknownLayer, NothingToQuantize: there is no such layer, or none that is left.
        AlreadyQuantized, WrongCheckpoint: the checkpoint.
    """
    from inductor_q.kbit.model import default_skip, progress_bars
    from inductor_q.kbit.sources import InMemory, Source
    from inductor_q.loading.files import Checkpoint, check_not_quantized
    from inductor_q.loading.layers import check_some, linear_layers
    from inductor_q.loading.sources import FromCheckpoint

    make = _maker(to)
    if checkpoint is not None:
        check_not_quantized(checkpoint)
    layers = linear_layers(model, default_skip(model) if skip is None else skip)
    check_some(layers, model)
    source: Source = (
        InMemory(model, layers, device)
        if checkpoint is None
        else FromCheckpoint(model, Checkpoint(checkpoint), device or "cpu")
    )
    with progress_bars(progress) as bars:
        for name in bars.track(list(layers), description="quantizing"):
            weight = source.weight(name)
            new = make(_linear(weight.to(layers[name].weight.dtype), layers[name].bias))
            _check_read(to, new)
            source.put(name, new)
    model = source.finish()
    _tell_transformers(model)
    return model


def _tell_transformers(model: nn.Module) -> None:
    """Write into the configuration of a model with layers of bitsandbytes how they are packed.

    Without it, `from_pretrained` of what `save_pretrained` writes would take codes for values.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    ours = [m for m in layers if type(m).__name__ in ("Linear4bit", "Linear8bitLt")]
    if not ours or not hasattr(model, "save_pretrained"):
        return
    from transformers import BitsAndBytesConfig, PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return  # a PEFT model, which saves its adapters alone
    layer: Any = ours[0]
    how: dict[str, Any] = {"load_in_8bit": True, "llm_int8_threshold": 0.0}
    if type(layer).__name__ == "Linear4bit":
        how = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": layer.weight.quant_type,
            "bnb_4bit_use_double_quant": layer.weight.compress_statistics,
            "bnb_4bit_compute_dtype": layer.compute_dtype,
        }
    plain = [name for name, layer in model.named_modules() if type(layer) is nn.Linear]
    model.config.quantization_config = BitsAndBytesConfig(**how, llm_int8_skip_modules=plain)


def resolve(to: Any) -> Any:
    """Return the name of the format that is asked for, or a configuration of torchao's.

    Raises:
        WrongScheme, UnknownFormat.
    """
    if isinstance(to, str):
        name = ALIASES.get(to, to)
        if name.startswith("mxfp"):
            raise WrongScheme(asked=to, problem=MX)
        if name not in FORMATS:
            raise UnknownFormat(name=to, known=(*ALIASES, *FORMATS))
        return name
    if isinstance(to, Mapping):
        return _resolve_mapping(dict(to))
    kind = type(to)
    if kind.__name__ == "BitsAndBytesConfig":
        if to.load_in_8bit:
            return INT8.name
        return _named(to, to.bnb_4bit_quant_type, 64, bool(to.bnb_4bit_use_double_quant))
    if kind.__name__ == "TorchAoConfig":
        return to.quant_type
    if kind.__module__.partition(".")[0] == "torchao":
        return to
    raise WrongScheme(asked=to, problem="expected a name, a mapping or a library's configuration")


MX = (
    "torchao has no product with MX weights that leaves activations as they are, so they are only "
    "read; nvfp4 and nf4 are formats of 4 bits that are written"
)


def _resolve_mapping(to: dict[str, Any]) -> Any:
    old = [key for key in DEPRECATED if to.pop(key, None)]
    if old:
        (first, *_), new = old, DEPRECATED[old[0]]
        warn_once(f"{first} is deprecated: ask for {new!r}")
        if len(old) > 1:
            raise WrongScheme(asked=old, problem="4 and 8 bits exclude each other")
        if not to:
            return resolve(new)
    known = ", ".join(FIELDS)
    if len(to) != 1:
        raise WrongScheme(asked=to, problem=f"expected exactly one key of {known}")
    ((library, given),) = to.items()
    if library == "mxfp4":
        raise WrongScheme(asked=to, problem=MX)
    if library not in FIELDS:
        raise WrongScheme(asked=to, problem=f"{library!r} is none of {known}")
    fields = dict(given or {})
    strange = sorted({*fields} - {*FIELDS[library]})
    if strange:
        problem = f"{library} has no {', '.join(strange)}; it has {', '.join(FIELDS[library])}"
        if any(field.startswith("activation") for field in strange):
            problem += (
                ". Weights alone are quantized, activations keep the model's dtype: leave it out"
            )
        raise WrongScheme(asked=to, problem=problem)
    if library == "bnb":
        found = (fields.get("quant_type", "nf4"), fields.get("blocksize", 64))
        return _named(to, *found, bool(fields.get("nested", True)))
    if library == "kbit":
        k, absmax = fields.get("k", 4), fields.get("absmax", "e4m4")
        if k not in KBITS or absmax not in KBIT_SCALES:
            problem = f"k is one of {KBITS}, absmax one of {tuple(KBIT_SCALES)}"
            raise WrongScheme(asked=to, problem=problem)
        return kbit_format_name(k, absmax)
    if library == "fp8":
        return resolve(f"fp8_{fields.get('of', 'row')}")
    if len(fields) != 1:
        raise WrongScheme(asked=to, problem="torchao takes either a format or a config")
    return resolve(next(iter(fields.values())))


def _named(asked: Any, quant_type: str, blocksize: int, nested: bool) -> str:
    if quant_type not in BNB_QUANT_TYPES or blocksize not in BLOCKSIZES:
        problem = f"quant_type is one of {tuple(BNB_QUANT_TYPES)}, blocksize one of {BLOCKSIZES}"
        raise WrongScheme(asked=asked, problem=problem)
    return bnb_format_name(quant_type, blocksize, nested)


def _maker(to: Any) -> Make:
    """Return what makes layers of what is asked for; import its library."""
    found = resolve(to)
    if not isinstance(found, str):
        return functools.partial(_torchao, found)
    fmt = FORMATS[found]
    if found == INT8.name:
        return functools.partial(_bnb_8bit, _bitsandbytes(found))
    if fmt.codec in BNB_QUANT_TYPES.values() and fmt.blockwise is not None:
        return functools.partial(_bnb_4bit, _bitsandbytes(found), found)
    if found.startswith("kbit"):
        return functools.partial(_kbit, int(found[4]), found.partition("_")[2])
    config = _torchao_config(found)
    if config is None:
        raise NoQuantizer(name=found, known=tuple(ALIASES))
    return functools.partial(_torchao, config)


def _bitsandbytes(name: str) -> Any:
    try:
        import bitsandbytes
    except ImportError:
        raise MissingExtra(package="bitsandbytes", extra="bnb", feature=name) from None
    return bitsandbytes.nn


def _bnb_4bit(library: Any, name: str, linear: nn.Linear) -> nn.Module:
    scale, weight = FORMATS[name].blockwise, linear.weight
    assert scale is not None, f"{name=}"
    nested, kind = scale.outer > 0, name.partition("_")[0]
    how = {"compress_statistics": nested, "quant_type": kind}
    with torch.device("meta"):
        sizes = (linear.in_features, linear.out_features)
        new = library.Linear4bit(*sizes, bias=False, compute_dtype=weight.dtype, **how)
    packed = library.Params4bit(
        weight.detach(), requires_grad=False, blocksize=scale.block, module=new, **how
    )
    new.weight, new.bias = packed.to(weight.device), linear.bias
    return _frozen(new)


def _bnb_8bit(library: Any, linear: nn.Linear) -> nn.Module:
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


def _kbit(k: int, absmax: str, linear: nn.Linear) -> nn.Module:
    from inductor_q import kbit

    layer: nn.Module = kbit.KBitLinear(kbit.quantize(linear.weight, k, absmax=absmax), linear.bias)
    return layer


def _torchao(config: Any, linear: nn.Linear) -> nn.Module:
    """Quantize by torchao, without the settings of Inductor that it would change for the process.

    They include coordinate descent tuning, which makes a first step take many times as long.
    """
    from torchao.quantization import quantize_

    if getattr(config, "set_inductor_config", False):
        config = dataclasses.replace(config, set_inductor_config=False)
    holder = nn.Sequential(linear)
    quantize_(holder, config)
    return _frozen(holder[0])


def _torchao_config(name: str) -> Any:
    """Return torchao's configuration that writes a format, or None."""
    family, _, of = name.rpartition("_")
    if family not in ("int8", "fp8_e4m3", "fp8_e5m2", "int4_tiles", "int4_plain", "nvfp4"):
        return None
    try:
        from torchao import quantization as ao
    except ImportError:
        raise MissingExtra(package="torchao", extra="torchao", feature=name) from None
    if family == "nvfp4":
        from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig

        return NVFP4WeightOnlyConfig() if of == "tiles" else None
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


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = bias  # type: ignore[assignment]
    return linear


def _frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def _check_read(to: Any, layer: nn.Module) -> None:
    """Raise where a configuration makes weights that no pass reads."""
    weight = layer._parameters.get("weight")
    layout = None if weight is None else capture.layout(weight)
    if layout is not None and layout.reason:
        raise WrongScheme(asked=to, problem=layout.reason)
