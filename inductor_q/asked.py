"""What `inductor_q.quantize` is asked for: names, mappings and configurations of libraries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from inductor_q.exc import UnknownFormat, WrongScheme
from inductor_q.formats import FORMATS, get_format
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
    "mxfp4": ("group_size",),
}

#: The dtypes in which bitsandbytes may keep codes; FSDP2 shards those of 16-bit numbers.
STORAGE = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)

#: The formats that torchao writes, by name.
OF_TORCHAO_FORMATS = re.compile(
    r"(int8|int4_tiles|int4_plain)_(row|tensor|g\d+)|fp8_e[45]m[23]_(row|tensor)|nvfp4_tiles"
    rf"|{OF_TORCHAO['nf4']}"
)

#: What "fp8" may be of, as the formats' names have it.
FP8_KINDS = tuple(n.removeprefix("fp8_") for n in (*ALIASES, *FORMATS) if n.startswith("fp8_"))

#: torchao's names that say nothing of groups, and the groups that they may have.
BY_GROUP = {"int4": SHIFTED_GROUPS, "int8": GROUPS[8]}

#: Spellings of transformers' first configurations, and those that say beside load_in_4bit what is a
#: field of "bnb" now.
DEPRECATED = {"load_in_4bit": "nf4", "load_in_8bit": "llm_int8"}
DEPRECATED_FIELDS = {
    "bnb_4bit_quant_type": "quant_type",
    "bnb_4bit_use_double_quant": "nested",
    "bnb_4bit_quant_storage": "quant_storage",
    "bnb_4bit_compute_dtype": "compute_dtype",
}

#: transformers' FP8 as it is packed here. How activations are quantized is no matter of weights,
#: but where their scales are stored somebody has to make them.
FP8_DEFAULTS = {
    "weight_block_size": (128, 128),
    "activation_scheme": "dynamic",
    "scale_fmt": "float",
    "expert_dtype": "fp8",
    "dequantize": False,
    "modules_to_convert": None,
}

#: By what torchao calls weights in its configurations that quantize activations too, the name to
#: ask for, and those for other scales than a row's.
WEIGHTS_ALONE = {"Int4": "int4", "Int8": "int8", "Float8": "fp8_row", "NVFP4": "nvfp4"}
WEIGHTS_ALONE_BY = {
    ("Int8", "PerTensor"): "int8_tensor",
    ("Float8", "PerTensor"): "fp8_tensor",
    ("Float8", "PerBlock"): "fp8_128x128",
}
MX_NAMES = {torch.float8_e4m3fn: "mxfp8", torch.float8_e5m2: "mxfp8_e5m2"}


def resolve(to: Any) -> Any:
    """Return the name of the format that is asked for, or a configuration of torchao's.

    Raises:
        WrongScheme, UnknownFormat.
    """
    if isinstance(to, str):
        name = ALIASES.get(to, to)
        if name not in FORMATS:
            raise UnknownFormat(name=to, known=[*{**ALIASES, **FORMATS}])
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
    if kind.__name__ == "FineGrainedFP8Config":
        return _resolve_fp8(to)
    if any(base.__name__ == "AOBaseConfig" for base in kind.__mro__):
        if ask_for := _weights_alone(to):
            problem = (
                "it quantizes activations as well, where weights alone are quantized here. "
                f"Ask for {ask_for}"
            )
            raise WrongScheme(asked=to, problem=problem)
        return to
    if kind.__module__.startswith("transformers."):
        raise WrongScheme(asked=to, problem=_of_a_checkpoint(to))
    raise WrongScheme(asked=to, problem="expected a name, a mapping or a library's configuration")


BY_LAYER = (
    "it says what each layer becomes, and one format is taken here. Apply it by "
    "torchao.quantization.quantize_(model, config, filter_fn=None), whose weights are read as well"
)
ANOTHER = "Ask for another format; `qfuse formats` lists them"
LEAVE_OUT = "Leave the layer out with skip=[...], or ask for another format"
ON_A_GPU = "Say device=, or ask for another format"


def _weights_alone(config: Any) -> str:
    """Say what to ask for in the place of a configuration of torchao's that quantizes activations
    too; "" for another."""
    found = re.search("(?:Dynamic|Static)Activation(.+)Weight", type(config).__name__)
    if found is None:
        return ""
    if found[1] == "MX":
        return repr(MX_NAMES.get(config.weight_dtype, "mxfp4"))
    if found[1] == "Intx":
        dtype, granularity = config.weight_dtype, config.weight_granularity
        return f"IntxWeightOnlyConfig(weight_dtype={dtype}, granularity={granularity})"
    if found[1] not in WEIGHTS_ALONE:
        return f"one of {', '.join(ALIASES)}"
    granularity = getattr(config, "granularity", None)
    of = granularity[-1] if isinstance(granularity, list) else granularity  # activations go first
    by = (found[1], type(of).__name__)
    return repr(WEIGHTS_ALONE_BY.get(by, WEIGHTS_ALONE[found[1]]))


def _resolve_fp8(to: Any) -> str:
    """Return the format of transformers' FP8, where nothing else than its defaults is asked for."""
    for name, default in FP8_DEFAULTS.items():
        value = getattr(to, name, default)
        if value != default and not (isinstance(value, list) and tuple(value) == default):
            problem = (
                f"{name}={value!r}; weights are packed here with {name}={default!r}. Leave it out, "
                "or ask for 'fp8_row' or 'fp8_tensor'; a checkpoint that is packed already is "
                "loaded by inductor_q.load_checkpoint"
            )
            raise WrongScheme(asked=to, problem=problem)
    return ALIASES["fp8_128x128"]


def _of_a_checkpoint(to: Any) -> str:
    """Say what to do with a configuration of transformers' by which nothing is packed here."""
    from inductor_q.loading.readers import READERS

    method = getattr(to, "quant_method", None)
    method = str(getattr(method, "value", method))
    how = (
        "load that by inductor_q.load_checkpoint"
        if method in READERS
        else f"nothing here reads or packs {method!r}"
    )
    return (
        f"it says how a checkpoint is packed: {how}. To pack a model's values, ask for one of "
        f"{', '.join(ALIASES)}"
    )


def _in_new_spelling(asked: Mapping[str, Any]) -> Any:
    """Return what a mapping asks for without deprecated keys: a name, or a mapping with one key.

    What stands beside them wins.
    """
    to = dict(asked)
    flags = {key: to.pop(key) for key in DEPRECATED if key in to}
    how = {key: to.pop(key) for key in DEPRECATED_FIELDS if key in to}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise WrongScheme(asked=asked, problem=f"{' and '.join(flags)} are True or False")
    old = [key for key, is_set in flags.items() if is_set]
    if len(old) > 1:
        raise WrongScheme(asked=asked, problem="4 and 8 bits exclude each other")
    known = ", ".join(FIELDS)
    if how and not to:
        named = {DEPRECATED_FIELDS[key]: value for key, value in how.items() if value is not None}
        fields = {"bnb": named}
        if old != ["load_in_4bit"]:
            problem = f"{' and '.join(how)} goes with load_in_4bit=True. Ask for {fields}"
            raise WrongScheme(asked=asked, problem=problem)
        warn_once(f"{' and '.join((*old, *how))} are deprecated: ask for {fields}")
        return fields
    if old and not to:
        new = DEPRECATED[old[0]]
        warn_once(f"{old[0]} is deprecated: ask for {new!r}")
        return new
    if flags and not to:
        problem = f"{' and '.join(flags)} set to False asks for nothing; give one key of {known}"
        raise WrongScheme(asked=asked, problem=problem)
    if len(to) != 1:
        raise WrongScheme(asked=asked, problem=f"expected exactly one key of {known}")
    (library,) = to
    if library not in FIELDS:
        raise WrongScheme(asked=asked, problem=f"{library!r} is none of {known}")
    for key in (*(old or flags), *how):  # beside a flag that is True, the other says nothing
        warn_once(f"{key} is deprecated, and ignored beside {library!r}")
    return to


def _resolve_mapping(asked: Mapping[str, Any]) -> Any:
    to = _in_new_spelling(asked)
    if isinstance(to, str):
        return resolve(to)
    ((library, given),) = to.items()
    if not isinstance(given, Mapping):
        problem = f"expected a mapping for {library!r}, with any of {FIELDS[library]}"
        raise WrongScheme(asked=to, problem=problem)
    fields = dict(given)
    strange = sorted(map(str, {*fields} - {*FIELDS[library]}))
    if strange:
        fields_of = ", ".join(FIELDS[library])
        problem = f"{library} has no {', '.join(strange)}; it has {fields_of}"
        if ask_for := [repr(DEPRECATED[name]) for name in strange if name in DEPRECATED]:
            problem += f". Ask for {' or '.join(ask_for)}"
        if any(field.startswith("activation") for field in strange):
            problem += (
                ". Weights alone are quantized, activations keep the model's dtype: leave it out"
            )
        raise WrongScheme(asked=to, problem=problem)
    if library == "bnb":
        if fields.get("quant_type") == "int8":
            if others := [name for name in FIELDS["bnb"][1:] if name in fields]:
                problem = f"LLM.int8 has no {' and no '.join(others)}: leave that out"
                raise WrongScheme(asked=to, problem=problem)
            return INT8.name
        found = (fields.get("quant_type", "nf4"), fields.get("blocksize", 64))
        return _named(to, *found, fields.get("nested", True))
    if library == "kbit":
        k, absmax = fields.get("k", 4), fields.get("absmax", "e4m4")
        if not _is_one_of(k, KBITS) or not _is_one_of(absmax, KBIT_SCALES):
            problem = f"k is one of {KBITS}, absmax one of {tuple(KBIT_SCALES)}"
            raise WrongScheme(asked=to, problem=problem)
        return kbit_format_name(k, absmax)
    if library == "fp8":
        of = fields.get("of", "row")
        if not _is_one_of(of, FP8_KINDS):
            raise WrongScheme(asked=to, problem=f"of is one of {FP8_KINDS}")
        return resolve(f"fp8_{of}")
    if library == "mxfp4":
        _check_group(to, library, library, fields.get("group_size"))
        return library
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
    name: str = OF_TORCHAO.get(short) or resolve(short)
    if not OF_TORCHAO_FORMATS.fullmatch(name):
        problem = (
            f"torchao packs no weights in {name!r} whose products leave activations as they are. "
            f"Ask for {short!r} by itself, outside of a mapping"
        )
        raise WrongScheme(asked=asked, problem=problem)
    _check_group(asked, short, name, size)
    return resolve(f"{short}_g{size}") if size is not None and short in BY_GROUP else name


def _check_group(asked: Any, short: str, name: str, size: Any) -> None:
    """Raise unless a format may have groups of this size, be it the only one; None is any."""
    columns = 1 << 20  # more than any group, and less than a row that would be one
    own = get_format(name).run(columns)
    sizes = BY_GROUP.get(short, (own,) if 0 < own < columns else ())
    if size is not None and not _is_one_of(size, sizes):
        possible = f"it is {' or '.join(map(str, sizes))}" if sizes else "that has no groups"
        others = "; ".join(f"{other!r} {sizes}" for other, sizes in BY_GROUP.items())
        problem = f"group_size={size!r} beside {short!r}; {possible}"
        if short not in BY_GROUP:
            problem += f". Leave it out, or ask for a format that has several: {others}"
        raise WrongScheme(asked=asked, problem=problem)


def _named(asked: Any, quant_type: Any, blocksize: Any, nested: Any) -> str:
    if not _is_one_of(quant_type, BNB_QUANT_TYPES) or not _is_one_of(blocksize, BLOCKSIZES):
        types = (*BNB_QUANT_TYPES, *(["int8"] if isinstance(asked, Mapping) else []))
        problem = f"quant_type is one of {types}, blocksize one of {BLOCKSIZES}"
        raise WrongScheme(asked=asked, problem=problem)
    if not isinstance(nested, bool):
        raise WrongScheme(asked=asked, problem=f"nested is True or False, not {nested!r}")
    return bnb_format_name(quant_type, blocksize, nested)


def _is_one_of(value: Any, known: Iterable[Any]) -> bool:
    """Whether a value is a known one, also in its type: 4.0 is no number of bits."""
    return any(isinstance(value, type(one)) and value == one for one in known)


def left_alone(to: Any, names: Iterable[str]) -> list[str] | None:
    """Return which of some names a configuration of transformers' leaves alone; None if it has no
    list of such.

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

    def is_left(name: str) -> bool:
        return name.endswith(tuple(entries)) or any(start.match(name) for start in starts)

    return [name for name in names if any(map(is_left, names_of(name)))]


def dtypes_of(to: Any) -> dict[str, torch.dtype]:
    """Return the dtypes of storage and of products that are asked for, where they are."""
    asked: dict[str, Any] = {}
    new = _in_new_spelling(to) if isinstance(to, Mapping) else None
    if isinstance(new, Mapping) and isinstance(given := new.get("bnb"), Mapping):
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
