"""Options of one compile: what the user, the environment, the mode and the preset say, merged.

`resolve` is the one place where a value is looked up, checked and given a source. Nothing here
writes torch's configuration: the result is handed to `compile_fx` as `config_patches`, so a setting
lives as long as its compile.

Priority: options={...} > QFUSE_* variables > preset. A mode is the user's word as
well, but a key beside it is more exact and wins.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import torch

from inductor_q import inductor_config, presets
from inductor_q.exc import (
    InvalidOptionValue,
    ModeConflict,
    UnknownMode,
    UnknownOption,
)
from inductor_q.inductor_config import GRAPHS, PARTITION, REUSE
from inductor_q.log import warn_once
from inductor_q.ops.eight_bits import unable
from inductor_q.own_options import (
    OPTIONS,
    Toggles,
    from_text,
    pass_names,
)
from inductor_q.presets import Entry, FrozenMap, Preset
from inductor_q.resolved import Numerics, Resolved

__all__ = [
    "FOR_DYNAMO",
    "Numerics",
    "Resolved",
    "asked",
    "check_options",
    "list_options",
    "resolve",
    "split_options",
]

#: What torch.compile takes out of `options` for Dynamo, before it calls a backend.
FOR_DYNAMO = ("guard_filter_fn", "use_aoti")


def resolve(
    mode: str | None,
    options: Mapping[str, Any] | None,
    *,
    device: torch.device,
    dynamic: bool = False,
) -> Resolved:
    """Merge and check all that the user, the environment, the mode and the preset set for one
    compile.
    """
    ours, patches = split_options(options or {})
    layers = {name: _layers(name, ours.get(name)) for name in OPTIONS}
    sources = {name: layers[name][-1].source if layers[name] else "default" for name in OPTIONS}

    def chosen(name: str, default: Any) -> Any:
        return layers[name][-1].value if layers[name] else default

    preset = presets.select(
        device,
        chosen("qfuse.preset", "auto"),
        source=_variable(sources, "qfuse.preset"),
        check=_check_entries,
    )
    for layer in layers["qfuse.thresholds"]:
        preset = _with_thresholds(preset, layer)
        sources |= {f"qfuse.thresholds.{item}": layer.source for item in layer.value}
    modes = inductor_config.modes(dynamic)
    mode = _mode(mode, chosen("qfuse.mode", None), tuple(modes), sources)

    inductor = _inductor(preset)
    # A CUDA graph would overwrite predictions that are kept; and that mode asks for none.
    if not torch.is_grad_enabled() or mode == "max-autotune-no-cudagraphs":
        inductor.pop(GRAPHS, None)
    sources |= dict.fromkeys(inductor, f"preset {preset.name}")
    for name, value in (modes[mode] if mode else {}).items():
        inductor[name] = value
        sources[name] = f"mode {mode}"
    for name, value in patches.items():
        inductor[name] = value
        sources[name] = "user"
    # Under the C++ wrapper torch makes no partitions, and False would switch CUDA graphs on there.
    by_cpp = inductor.get("cpp_wrapper", inductor_config.current("cpp_wrapper"))
    if inductor_config.wants_graphs(inductor) and PARTITION not in inductor and not by_cpp:
        inductor[PARTITION] = False
        sources[PARTITION] = "qfuse"
    if by_cpp and device.type == "cuda":
        added = inductor_config.for_cpp_wrapper()
        sources |= dict.fromkeys(added.keys() - inductor.keys(), "qfuse")
        inductor = added | inductor

    compute = chosen("qfuse.compute", "bf16")
    # At the peak of a step in FP8 Inductor would hold buffers that have ended for others of their
    # size, and save no time by that.
    if compute == "fp8" and device.type == "cuda" and REUSE not in inductor:
        inductor[REUSE] = False
        sources[REUSE] = "qfuse"

    numerics = chosen("qfuse.numerics", "default")
    resolved = Resolved(
        inductor=FrozenMap(inductor),
        preset=preset,
        passes=_passes(layers["qfuse.passes"], sources),
        numerics=numerics,
        loss=chosen("qfuse.loss", "auto"),
        compute=compute,
        exclude=chosen("qfuse.compute.exclude", ()),
        memory=_memory(chosen("qfuse.memory", None), device, _variable(sources, "qfuse.memory")),
        offload=chosen("qfuse.offload", False),
        kernels=_kernels([*_of_preset(preset), *layers["qfuse.kernels"]], sources),
        report=chosen("qfuse.report", None),
        strict=chosen("qfuse.strict", False),
        sources=FrozenMap(sources),
    )
    for message in (*_conflicts(resolved, device, dynamic), *_environment_typos()):
        warn_once(message)
    return resolved


def asked(name: str, options: Mapping[str, Any] | None) -> Any:
    """Return what the user, or else the environment, sets for an option of ours; None for neither.

    It is checked as in a compile.
    """
    layers = _layers(name, split_options(options or {})[0].get(name))
    return layers[-1].value if layers else None


def _with_thresholds(preset: Preset, layer: _Layer) -> Preset:
    entries = {
        name: Entry(value=value, evidence=f"set by the {layer.source}")
        for name, value in layer.value.items()
    }
    return replace(preset, thresholds={**preset.thresholds, **entries})


def check_options(
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    *,
    device: torch.device | str | None = None,
) -> None:
    """Raise for options that `torch.compile(..., backend="qfuse")` would refuse.

    `torch.compile` keeps options unread until it compiles the first graph, which is after a model
    has been loaded and its first batch made. Call this before: `QFUSE_*` variables are checked as
    well, and conflicts are logged.

    Args:
        options, mode: as for `torch.compile`.
        device: where the model will be, since presets and providers depend on it; by default the
            current GPU, or the CPU where there is none.

    Raises:
        UnknownOption, InvalidOptionValue, UnknownMode, ModeConflict, UnknownPreset, UnknownPass,
        UnknownOp, UnknownProvider: each names the value and the nearest ones that are known.
    """
    resolve(mode, options, device=torch.device(device) if device else current_device())


def current_device() -> torch.device:
    """Return the current GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def list_options() -> dict[str, str]:
    """List every key that options={...} takes, with one line about it: ours, then Inductor's."""
    listing = {name: str(option) for name, option in OPTIONS.items()}
    for name, key in sorted(inductor_config.schema().items()):
        if any(part.startswith("_") for part in name.split(".")):
            continue
        if key.deprecated:
            listing[name] = f"Inductor: deprecated, {key.deprecated}"
        elif key.alias:
            listing[name] = f"Inductor: same as {key.alias}"
        else:
            kind = inductor_config.describe(key.declared)
            listing[name] = f"Inductor: {kind}; now {reprlib.repr(inductor_config.current(name))}"
    return listing


# --- reading: what was given, by whom -----------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    source: str
    value: Any


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read our options raw and Inductor's checked, both by their full canonical names. Dynamo's are
    left out."""
    if not isinstance(options, Mapping):
        raise InvalidOptionValue(name="options", value=options, expected="a mapping of their names")
    ours: dict[str, Any] = {}
    patches: dict[str, Any] = {}
    translated: dict[str, tuple[str, Any]] = {}
    schema = inductor_config.schema()
    for given, value in _flat(options):
        name = given.replace("-", "_")
        if name in FOR_DYNAMO:
            continue
        if name in OPTIONS:
            ours[name] = value
            continue
        if name not in schema:
            raise UnknownOption(name=given, known=(*OPTIONS, *schema))
        if _is_empty(value) and not _admits(name, value):
            continue
        value = _checked(name, value)
        if schema[name].deprecated:
            warn_once(f"the Inductor option {name} is deprecated: {schema[name].deprecated}")
        if schema[name].alias:
            translated[schema[name].alias] = (name, value)
        else:
            patches[name] = value
    for name, (alias, value) in translated.items():
        if patches.setdefault(name, value) != value:
            held = f"{name}={patches[name]!r} holds"
            warn_once(f"{alias} and {name} are one option and differ: {held}")
    return ours, patches


def _flat(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Return options under dotted names, as "triton.cudagraphs" for {"triton": {"cudagraphs":
    True}}.
    """
    known = (*OPTIONS, *inductor_config.schema())
    for key, value in options.items():
        name = f"{prefix}{key}"
        is_group = name not in known and any(other.startswith(f"{name}.") for other in known)
        if is_group and isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and not value)


def _admits(name: str, value: Any) -> bool:
    declared = inductor_config.schema()[name].declared
    return inductor_config.coerce(value, declared) is not inductor_config.MISMATCH


def _checked(name: str, value: Any) -> Any:
    """Return the value of an Inductor key as torch declares it."""
    declared = inductor_config.schema()[name].declared
    if declared is type(None):  # torch does not say which type: only that the default is None
        return value
    result = inductor_config.coerce(value, declared)
    if result is inductor_config.MISMATCH:
        expected = inductor_config.describe(declared)
        raise InvalidOptionValue(name=name, value=value, expected=expected)
    return result


def _layers(name: str, given: Any) -> list[_Layer]:
    """Return what the environment and then the user set for one of our options."""
    option = OPTIONS[name]
    layers = []
    if option.variable and (text := os.environ.get(option.variable, "").strip()):
        source = f"environment variable {option.variable}"
        layers.append(_Layer("environment", option.parse(name, from_text(name, text), source)))
    if not _is_empty(given):
        layers.append(_Layer("user", option.parse(name, given, "")))
    return layers


def _variable(sources: Mapping[str, str], name: str) -> str:
    is_environment = sources[name] == "environment"
    return f"environment variable {OPTIONS[name].variable}" if is_environment else ""


# --- merging ------------------------------------------------------------------------------------


def _mode(
    argument: str | None, option: str | None, known: tuple[str, ...], sources: dict[str, str]
) -> str | None:
    if argument is not None and option is not None and argument != option:
        raise ModeConflict(argument=argument, option=option)
    mode = option if option is not None else argument
    if mode is not None and mode not in known:
        raise UnknownMode(name=str(mode), known=known)
    if mode is not None:
        sources["qfuse.mode"] = "user"
    return mode


def _passes(layers: list[_Layer], sources: dict[str, str]) -> tuple[str, ...]:
    enabled = dict.fromkeys(pass_names(), True)
    for layer in layers:
        toggles: Toggles = layer.value
        said = (
            {**dict.fromkeys(enabled, False), **toggles.values} if toggles.exact else toggles.values
        )
        for name, on in said.items():
            enabled[name] = on
            sources[f"qfuse.passes.{name}"] = layer.source
    return tuple(name for name, on in enabled.items() if on)


def _memory(value: int | float | None, device: torch.device, source: str) -> int | None:
    """Return a budget of memory in bytes, of a share as well."""
    if not isinstance(value, float):
        return value
    if device.type == "cuda":
        return int(value * torch.cuda.get_device_properties(device).total_memory)
    expected = f'an amount of memory such as "8GB": the {device.type} has none to take a share of'
    raise InvalidOptionValue(name="qfuse.memory", value=value, expected=expected, source=source)


def _check_entries(preset: Preset) -> None:
    """Raise for options and providers of a preset that a compile would refuse.

    Raises:
        UnknownOption, InvalidOptionValue, UnknownOp, UnknownProvider
    """
    _inductor(preset)
    list(_of_preset(preset))


def _inductor(preset: Preset) -> dict[str, Any]:
    return split_options({name: entry.value for name, entry in preset.options.items()})[1]


def _of_preset(preset: Preset) -> Iterator[_Layer]:
    """Return the providers of a preset as the layer below what was asked for."""
    if preset.kernels:
        named = {op: entry.value for op, entry in preset.kernels.items()}
        source = f"preset {preset.name}"
        yield _Layer(source, OPTIONS["qfuse.kernels"].parse("qfuse.kernels", named, source))


def _kernels(layers: list[_Layer], sources: dict[str, str]) -> FrozenMap[str]:
    preferred: dict[str, str] = {}
    for layer in layers:
        preferred |= layer.value
        sources |= {f"qfuse.kernels.{op}": layer.source for op in layer.value}
    return FrozenMap(preferred)


# --- conflicts: logged once, never an error ----------------------------------------------------


def _conflicts(resolved: Resolved, device: torch.device, dynamic: bool) -> Iterator[str]:
    def value(name: str) -> Any:
        return resolved.inductor.get(name, inductor_config.current(name))

    def who(name: str) -> str:
        return resolved.sources.get(name, "torch's own configuration")

    preset = resolved.preset
    if device.type == "cuda":
        skips = value("triton.cudagraph_skip_dynamic_graphs")
        if value(GRAPHS) and value(PARTITION) and not value("cpp_wrapper"):
            yield (
                f"{PARTITION} ({who(PARTITION)}) with {GRAPHS} ({who(GRAPHS)}) gives wrong results "
                "where torch cuts a graph between parts that are concatenated: leave it out, and a "
                "graph that cannot be one CUDA graph runs without"
            )
        if dynamic and value(GRAPHS) and not skips:
            yield (
                f"{GRAPHS} ({who(GRAPHS)}) with dynamic shapes records one "
                "graph a shape and keeps each: pad to few lengths, or set "
                "'triton.cudagraph_skip_dynamic_graphs': True, or compile without cudagraphs"
            )
        for name, entry in preset.losses.items():
            if value(name) == entry.value:
                yield f"{name}={entry.value} ({who(name)}) loses on {preset.name}: {entry.evidence}"
                break
        total = torch.cuda.get_device_properties(device).total_memory if preset.min_memory else 0
        for name, entry in preset.min_memory.items():
            if value(name) and total < entry.value:
                yield (
                    f"{name} ({who(name)}) may not fit in the {total / 1e9:.1f} GB of this device: "
                    f"{entry.evidence}"
                )
                break
    if resolved.compute != "bf16":
        why = unable(resolved.compute, device)
        if resolved.numerics == "strict":
            why = "qfuse.numerics is 'strict', under which products stay as they are"
        if why:
            compute = f"qfuse.compute={resolved.compute!r} ({who('qfuse.compute')})"
            yield f"{compute} has no effect: {why}"
    if resolved.exclude and resolved.compute == "bf16":
        yield (
            "qfuse.compute.exclude has no effect: qfuse.compute is 'bf16', which computes no "
            "product in eight bits"
        )
    if resolved.offload and resolved.memory is None:
        yield "qfuse.offload has no effect without qfuse.memory: there is no budget to keep"
    if "canonicalize" in resolved.passes and "keep_packed" not in resolved.passes:
        yield (
            "qfuse.passes: canonicalize without keep_packed saves every dequantized weight for the "
            "backward; switch both or neither"
        )


def _environment_typos() -> Iterator[str]:
    variables = [option.variable for option in OPTIONS.values() if option.variable]
    for name in os.environ:
        if name.startswith("QFUSE_") and name not in variables:
            for near in get_close_matches(name, variables, n=1, cutoff=0.8):
                yield f"environment variable {name} is not read; did you mean {near}?"
