"""One way to ask for quantized linear layers, whichever library writes the format.

Layers are those of the library: bitsandbytes' `Linear4bit` and `Linear8bitLt`, linear layers with
weights of torchao's, `KBitLinear`. No library is imported before its format is asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inductor_q import capture
from inductor_q.capture.packed import packed_tensors
from inductor_q.exc import (
    MissingExtra,
    NoQuantizer,
    NotAModel,
    NoValues,
    UnknownFormat,
    WrongScheme,
)
from inductor_q.formats import FORMATS
from inductor_q.formats.aliases import ALIASES
from inductor_q.formats.bnb import BLOCKSIZES, BNB_QUANT_TYPES, INT8, bnb_format_name
from inductor_q.formats.kbit import KBIT_SCALES, KBITS, kbit_format_name
from inductor_q.log import warn_once

#: What a mapping may ask, and with which fields.
FIELDS = {
    "bnb": ("quant_type", "blocksize", "nested", "quant_storage", "compute_dtype"),
    "torchao": ("format", "config"),
    "kbit": ("k", "absmax"),
    "fp8": ("of",),
}

#: The dtypes in which bitsandbytes may keep codes; FSDP2 shards those of 16-bit numbers.
STORAGE = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)

#: Spellings of transformers' first configurations.
DEPRECATED = {"load_in_4bit": "nf4", "load_in_8bit": "llm_int8"}

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
    Layers of bitsandbytes are noted in the configuration of a model of transformers, so that
    `from_pretrained` loads what its `save_pretrained` writes.

    Args:
        model: a model, a linear layer, or a causal language model's configuration of transformers'
            beside `checkpoint`: its model is made without memory, in the configuration's dtype
            (bfloat16 if it has none) and, as by `from_pretrained`, for evaluation.
        to: a format's name (`inductor_q.FORMATS`) or a short one: "nf4", "fp4", "int8", "llm_int8",
            "fp8_row", "fp8_tensor", "int4_g128", "nvfp4", "kbit4". Or a mapping with one key:
            `{"bnb": {"quant_type": "nf4", "blocksize": 64, "nested": True}}`, where `quant_storage`
            (torch.bfloat16 for FSDP2) and `compute_dtype` may be said too, `{"torchao":
            {"config": ...}}`, `{"kbit": {"k": 4}}`, `{"fp8": {"of": "row"}}`. Or a configuration
            of torchao's, or transformers' `BitsAndBytesConfig` or `TorchAoConfig`, whose lists of
            modules to leave alone count as `skip`, by transformers' rules. Inductor's
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
        NotNames: `skip` is a text.
        NotAModel: `model` is neither a module nor such a configuration.
        WrongScheme, UnknownFormat, NoQuantizer, MissingExtra: what is asked for, or a layer whose
            shape the library does not take.
        NoValues: a weight is on the meta device, or a configuration was given, and there is no
            checkpoint.
        NotFinite, ScaleOutOfRange: a weight, by name, that has no K-bit codes.
        UnknownLayer, NothingToQuantize: there is no such layer, or none that is left.
        AlreadyQuantized, WrongCheckpoint: the checkpoint.
    """
    from inductor_q.kbit.model import progress_bars, skip_patterns
    from inductor_q.kbit.sources import InMemory, Source
    from inductor_q.loading.files import Checkpoint, check_not_quantized
    from inductor_q.loading.layers import check_some, linear_layers
    from inductor_q.loading.sources import FromCheckpoint

    found = resolve(to)
    make = _maker(to, found)
    if checkpoint is not None:
        check_not_quantized(checkpoint)
    if not isinstance(model, nn.Module):
        model = _empty(model, checkpoint)
    left = _left_alone(to, model)
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
        layer = make(_linear(weight.to(layers[name].weight.dtype), bias), what)
        _check_read(to, layer, what)
        return layer

    if isinstance(found, str) and found.startswith("kbit"):
        source.check(layers, found.partition("_")[2])
    if checkpoint is None:  # where layers change one by one, one of each kind is tried before
        weights = ((name, layer.weight) for name, layer in layers.items())
        kinds = {(w.shape, w.dtype, w.device): name for name, w in weights}
        for name in kinds.values():
            made(name, None)
    with progress_bars(progress) as bars:
        for name in bars.track(list(layers), description="quantizing"):
            source.put(name, made(name, layers[name].bias))
    model = source.finish()
    _tell_transformers(model)
    _tell_of_experts(model, to)
    return model


def _tell_of_experts(model: nn.Module, to: Any) -> None:
    """Warn of fused experts, which are no `nn.Linear`."""
    left = [
        name
        for name, module in model.named_modules()
        if capture.holds_experts(module)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 3 and parameter.is_floating_point() and parameter.itemsize > 1
    ]
    if left:
        asked = repr(to) if isinstance(to, str) else "a format's name"
        warn_once(
            f"inductor_q.quantize: the fused experts of {len({*left})} layers stay in 16 bits; "
            f"inductor_q.experts.quantize(model, {asked}) packs them"
        )


def _empty(config: Any, checkpoint: str | Path | None) -> nn.Module:
    """Make the causal language model of a configuration, with its parameters on meta."""
    from inductor_q.loading.files import meta_parameters

    name = type(config).__name__
    if not hasattr(config, "model_type"):
        raise NotAModel(found=name)
    if checkpoint is None:
        raise NoValues(what=f"the model that a {name} describes")
    from transformers import AutoModelForCausalLM

    with meta_parameters():
        dtype = getattr(config, "dtype", None) or torch.bfloat16
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def _tell_transformers(model: nn.Module) -> None:
    """Mark a model with layers of bitsandbytes as transformers does, and write into its
    configuration how they are packed.

    Without that, `from_pretrained` of what `save_pretrained` writes would take codes for values.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    ours = [m for m in layers if type(m).__name__ in ("Linear4bit", "Linear8bitLt")]
    if not ours or isinstance(model, nn.Linear):
        return
    is_4bit = type(ours[0]).__name__ == "Linear4bit"
    # PEFT chooses the class of its layers by it, and TRL the dtype of adapters.
    setattr(model, "is_loaded_in_4bit" if is_4bit else "is_loaded_in_8bit", True)
    if not hasattr(model, "save_pretrained"):
        return
    from transformers import BitsAndBytesConfig, PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return  # a PEFT model, which saves its adapters alone
    layer: Any = ours[0]
    how: dict[str, Any] = {"load_in_8bit": True, "llm_int8_threshold": 0.0}
    if is_4bit:
        how = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": layer.weight.quant_type,
            "bnb_4bit_use_double_quant": layer.weight.compress_statistics,
            "bnb_4bit_compute_dtype": layer.compute_dtype,
            "bnb_4bit_quant_storage": layer.weight.quant_storage,
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
        return _resolve_mapping(to)
    kind = type(to)
    if kind.__name__ == "BitsAndBytesConfig":
        if to.load_in_8bit:
            return INT8.name
        if not to.load_in_4bit:
            raise WrongScheme(asked=to, problem="it sets neither load_in_4bit nor load_in_8bit")
        return _named(to, to.bnb_4bit_quant_type, 64, to.bnb_4bit_use_double_quant)
    if kind.__name__ == "TorchAoConfig":
        return resolve(to.quant_type)
    if kind.__name__ in ("FqnToConfig", "ModuleFqnToConfig"):
        raise WrongScheme(asked=to, problem=BY_LAYER)
    if kind.__module__.partition(".")[0] == "torchao":
        return to
    if kind.__module__.startswith("transformers."):
        problem = "it says how a checkpoint is packed: load that by inductor_q.load_checkpoint"
        raise WrongScheme(asked=to, problem=problem)
    raise WrongScheme(asked=to, problem="expected a name, a mapping or a library's configuration")


BY_LAYER = (
    "it says what each layer becomes, and one format is taken here. Apply it by "
    "torchao.quantization.quantize_(model, config, filter_fn=None), whose weights are read as well"
)
LEAVE_OUT = "Leave the layer out with skip=[...], or ask for another format"

MX = (
    "torchao has no product with MX weights that leaves activations as they are, so they are only "
    "read; nvfp4 and nf4 are formats of 4 bits that are written"
)


def _resolve_mapping(asked: Mapping[str, Any]) -> Any:
    to = dict(asked)
    flags = {key: to.pop(key) for key in DEPRECATED if key in to}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise WrongScheme(asked=asked, problem=f"{' and '.join(flags)} are True or False")
    old = [key for key, is_set in flags.items() if is_set]
    if len(old) > 1:
        raise WrongScheme(asked=asked, problem="4 and 8 bits exclude each other")
    if old:
        new = DEPRECATED[old[0]]
        if not to:
            warn_once(f"{old[0]} is deprecated: ask for {new!r}")
            return resolve(new)
        warn_once(f"{old[0]} is deprecated, and ignored beside {', '.join(map(repr, to))}")
    known = ", ".join(FIELDS)
    if len(to) != 1:
        raise WrongScheme(asked=to, problem=f"expected exactly one key of {known}")
    ((library, given),) = to.items()
    if library == "mxfp4":
        raise WrongScheme(asked=to, problem=MX)
    if library not in FIELDS:
        raise WrongScheme(asked=to, problem=f"{library!r} is none of {known}")
    if not isinstance(given, Mapping):
        problem = f"expected a mapping for {library!r}, with any of {FIELDS[library]}"
        raise WrongScheme(asked=to, problem=problem)
    fields = dict(given)
    strange = sorted(map(str, {*fields} - {*FIELDS[library]}))
    if strange:
        problem = f"{library} has no {', '.join(strange)}; it has {', '.join(FIELDS[library])}"
        if any(field.startswith("activation") for field in strange):
            problem += (
                ". Weights alone are quantized, activations keep the model's dtype: leave it out"
            )
        raise WrongScheme(asked=to, problem=problem)
    if library == "bnb":
        found = (fields.get("quant_type", "nf4"), fields.get("blocksize", 64))
        return _named(to, *found, fields.get("nested", True))
    if library == "kbit":
        k, absmax = fields.get("k", 4), fields.get("absmax", "e4m4")
        if not _is_one_of(k, KBITS) or not _is_one_of(absmax, KBIT_SCALES):
            problem = f"k is one of {KBITS}, absmax one of {tuple(KBIT_SCALES)}"
            raise WrongScheme(asked=to, problem=problem)
        return kbit_format_name(k, absmax)
    if library == "fp8":
        return resolve(f"fp8_{fields.get('of', 'row')}")
    if len(fields) != 1:
        raise WrongScheme(asked=to, problem="torchao takes either a format or a config")
    return resolve(next(iter(fields.values())))


def _named(asked: Any, quant_type: Any, blocksize: Any, nested: Any) -> str:
    if not _is_one_of(quant_type, BNB_QUANT_TYPES) or not _is_one_of(blocksize, BLOCKSIZES):
        problem = f"quant_type is one of {tuple(BNB_QUANT_TYPES)}, blocksize one of {BLOCKSIZES}"
        raise WrongScheme(asked=asked, problem=problem)
    if not isinstance(nested, bool):
        raise WrongScheme(asked=asked, problem=f"nested is True or False, not {nested!r}")
    return bnb_format_name(quant_type, blocksize, nested)


def _is_one_of(value: Any, known: Iterable[Any]) -> bool:
    """Whether a value is a known one, also in its type: 4.0 is no number of bits."""
    return any(isinstance(value, type(one)) and value == one for one in known)


def _left_alone(to: Any, model: nn.Module) -> list[str] | None:
    """Return the layers that a configuration of transformers' leaves alone; None if it names none.

    As there, an entry is the start of a name, up to a dot or its end, a regular expression for one,
    or the end of a name. An entry that fits no layer is no error: embeddings and norms are named.
    """
    from inductor_q.loading.layers import names_of

    fields = ("llm_int8_skip_modules", "modules_to_not_convert")
    entries = next((found for f in fields if (found := getattr(to, f, None)) is not None), None)
    if entries is None:
        return None
    try:
        starts = [re.compile(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))") for entry in entries]
    except re.error as error:
        problem = f"transformers reads {entries} as regular expressions: {error}"
        raise WrongScheme(asked=to, problem=problem) from None
    linears = (name for name, module in model.named_modules() if type(module) is nn.Linear)

    def is_left(name: str) -> bool:
        return name.endswith(tuple(entries)) or any(start.match(name) for start in starts)

    return [name for name in linears if any(map(is_left, names_of(name)))]


def _maker(to: Any, found: Any) -> Make:
    """Return what makes layers of what `to` asks for and is resolved to; import its library."""
    if not isinstance(found, str):
        return functools.partial(_torchao, to, found)
    fmt = FORMATS[found]
    if found == INT8.name:
        if threshold := getattr(to, "llm_int8_threshold", 0.0):
            warn_once(
                f"llm_int8_threshold={threshold} becomes 0.0: how many outliers a batch has "
                "depends on the data, and breaks graphs"
            )
        return functools.partial(_bnb_8bit, _bitsandbytes(found))
    if fmt.codec in BNB_QUANT_TYPES.values() and fmt.blockwise is not None:
        return functools.partial(_bnb_4bit, _bitsandbytes(found), found, _dtypes(to))
    if found.startswith("kbit"):
        return functools.partial(_kbit, int(found[4]), found.partition("_")[2])
    config = _torchao_config(found)
    if config is None:
        raise NoQuantizer(name=found, known=tuple(ALIASES))
    return functools.partial(_torchao, to, config)


def _bitsandbytes(name: str) -> Any:
    try:
        import bitsandbytes
    except ImportError:
        raise MissingExtra(package="bitsandbytes", extra="bnb", feature=name) from None
    return bitsandbytes.nn


def _dtypes(to: Any) -> dict[str, torch.dtype]:
    """Return the dtypes of storage and of products that are asked for, where they are."""
    asked: dict[str, Any] = {}
    if isinstance(to, Mapping) and isinstance(given := to.get("bnb"), Mapping):
        asked = {name: given[name] for name in ("quant_storage", "compute_dtype") if name in given}
    elif type(to).__name__ == "BitsAndBytesConfig":
        asked = {"quant_storage": to.bnb_4bit_quant_storage}
        if to.bnb_4bit_compute_dtype != torch.float32:  # its default, which means the input's
            asked["compute_dtype"] = to.bnb_4bit_compute_dtype
    found: dict[str, Any] = {
        n: getattr(torch, v, v) if isinstance(v, str) else v for n, v in asked.items()
    }
    for name, value in found.items():
        known = STORAGE if name == "quant_storage" else STORAGE[1:]
        if value not in known:
            raise WrongScheme(asked=to, problem=f"{name} is one of {known}, not {value!r}")
    return found


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


def _torchao(to: Any, config: Any, linear: nn.Linear, what: str) -> nn.Module:
    """Quantize by torchao, without the settings of Inductor that it would change for the process.

    They include coordinate descent tuning, which makes a first step take many times as long. Shapes
    that torchao does not take are errors of several kinds there, and of one here.
    """
    from torchao.quantization import quantize_

    if getattr(config, "set_inductor_config", False):
        config = dataclasses.replace(config, set_inductor_config=False)
    holder = nn.Sequential(linear)
    try:
        quantize_(holder, config)
    except torch.OutOfMemoryError:
        raise
    except ImportError as error:
        raise WrongScheme(asked=to, problem=f"torchao lacks what packs it: {error}") from error
    except (AssertionError, RuntimeError, ValueError) as error:
        problem = f"torchao does not take the {what} ({error}). {LEAVE_OUT}"
        raise WrongScheme(asked=to, problem=problem) from error
    return _frozen(holder[0])


def _torchao_config(name: str) -> Any:
    """Return torchao's configuration that writes a format, or None."""
    family, _, of = name.rpartition("_")
    if family not in ("int8", "fp8_e4m3", "fp8_e5m2", "int4_tiles", "int4_plain", "nvfp4"):
        return None
    if family != "nvfp4" and not re.fullmatch(r"row|tensor|g\d+", of):
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


def _check_read(to: Any, layer: nn.Module, what: str) -> None:
    """Raise where a library makes a weight that no pass reads, or leaves it as it is."""
    if not any(packed_tensors(layer)):
        problem = f"the library leaves the {what} as it is, unpacked. {LEAVE_OUT}"
        raise WrongScheme(asked=to, problem=problem)
    weight = layer._parameters.get("weight")
    layout = None if weight is None else capture.layout(weight)
    if layout is not None and layout.reason:
        raise WrongScheme(asked=to, problem=layout.reason)
