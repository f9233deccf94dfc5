"""What `inductor_q.quantize` is asked for: names, mappings and configurations of libraries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from inductor_q.exc import UnknownFormat, WrongScheme
from inductor_q.formats import FORMATS
from inductor_q.formats.aliases import ALIASES, OF_TORCHAO
from inductor_q.formats.bnb import BLOCKSIZES, BNB_QUANT_TYPES, INT8, bnb_format_name
from inductor_q.formats.intx import GROUPS, SHIFTED_GROUPS
from inductor_q.formats.kbit import KBIT_SCALES, KBITS, kbit_format_name
from inductor_q.log import warn_once

#: What a mapping may ask, and with which fields.
FIELDS = {
    "bnb": ("quant_type", "blocksize", "nested", "quant_storage", "compute_dtype"),
    "torchao": ("format", "group_size", "config"),
    "kbit": ("k", "absmax"),
    "fp8": ("of",),
    "mxfp4": (),
}

#: The dtypes in which bitsandbytes may keep codes; FSDP2 shards those of 16-bit numbers.
STORAGE = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)

#: The formats that torchao writes, by name.
OF_TORCHAO_FORMATS = re.compile(
    r"(int8|int4_tiles|int4_plain)_(row|tensor|g\d+)|fp8_e[45]m[23]_(row|tensor)|nvfp4_tiles"
    rf"|{OF_TORCHAO['nf4']}"
)

#: Spellings of transformers' first configurations.
DEPRECATED = {"load_in_4bit": "nf4", "load_in_8bit": "llm_int8"}


def resolve(to: Any) -> Any:
    """Return the name of the format that is asked for, or a configuration of torchao's.

    Raises:
        WrongScheme, UnknownFormat.
    """
    if isinstance(to, str):
        name = ALIASES.get(to, to)
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
        if to.include_input_output_embeddings:
            problem = "embeddings are left alone here: leave include_input_output_embeddings out"
            raise WrongScheme(asked=to, problem=problem)
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
ON_A_GPU = "Say device=, or ask for another format"


def _resolve_mapping(asked: Mapping[str, Any]) -> Any:
    to = dict(asked)
    flags = {key: to.pop(key) for key in DEPRECATED if key in to}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise WrongScheme(asked=asked, problem=f"{' and '.join(flags)} are True or False")
    old = [key for key, is_set in flags.items() if is_set]
    if len(old) > 1:
        raise WrongScheme(asked=asked, problem="4 and 8 bits exclude each other")
    known = ", ".join(FIELDS)
    if old and not to:
        new = DEPRECATED[old[0]]
        warn_once(f"{old[0]} is deprecated: ask for {new!r}")
        return resolve(new)
    if flags and not to:
        problem = f"{' and '.join(flags)} set to False asks for nothing; give one key of {known}"
        raise WrongScheme(asked=asked, problem=problem)
    if len(to) != 1:
        raise WrongScheme(asked=asked, problem=f"expected exactly one key of {known}")
    for flag in old or flags:  # beside one that is True, the other says nothing
        warn_once(f"{flag} is deprecated, and ignored beside {', '.join(map(repr, to))}")
    ((library, given),) = to.items()
    if library not in FIELDS:
        raise WrongScheme(asked=to, problem=f"{library!r} is none of {known}")
    if not isinstance(given, Mapping):
        problem = f"expected a mapping for {library!r}, with any of {FIELDS[library]}"
        raise WrongScheme(asked=to, problem=problem)
    fields = dict(given)
    strange = sorted(map(str, {*fields} - {*FIELDS[library]}))
    if strange:
        fields_of = ", ".join(FIELDS[library]) or "no settings"
        problem = f"{library} has no {', '.join(strange)}; it has {fields_of}"
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
    if library == "mxfp4":
        return "mxfp4"
    return _resolve_torchao(to, fields)


def _resolve_torchao(asked: Mapping[str, Any], fields: Mapping[str, Any]) -> Any:
    """Return the format of that name that torchao writes, or the configuration."""
    if ("format" in fields) == ("config" in fields):
        raise WrongScheme(asked=asked, problem="torchao takes either a format or a config")
    if "config" in fields:
        if "group_size" in fields:
            problem = "group_size goes with format; a configuration of torchao's has its own"
            raise WrongScheme(asked=asked, problem=problem)
        return resolve(fields["config"])
    short, size = fields["format"], fields.get("group_size")
    if not isinstance(short, str):
        problem = f"format is a name, not {short!r}; a configuration of torchao's goes under config"
        raise WrongScheme(asked=asked, problem=problem)
    if size is not None:
        by_group = {"int4": SHIFTED_GROUPS, "int8": GROUPS[8]}
        if not _is_one_of(size, by_group.get(short, ())):
            sizes = "; ".join(f"with {name!r} {sizes}" for name, sizes in by_group.items())
            problem = f"group_size={size!r} beside {short!r}; it is one of these: {sizes}"
            raise WrongScheme(asked=asked, problem=problem)
        short = f"{short}_g{size}"
    name: str = OF_TORCHAO.get(short) or resolve(short)
    if not OF_TORCHAO_FORMATS.fullmatch(name):
        problem = (
            f"torchao packs no weights in {name!r} whose products leave activations as they are. "
            f"Ask for {short!r} by itself, outside of a mapping"
        )
        raise WrongScheme(asked=asked, problem=problem)
    return name


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


def left_alone(to: Any, model: nn.Module) -> list[str] | None:
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


def dtypes_of(to: Any) -> dict[str, torch.dtype]:
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
