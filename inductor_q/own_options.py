"""The backend's own options: what each accepts, spelled in Python and in the environment.

A new option is a parser and one line of `OPTIONS`; `inductor_q.options` gives it a source, a
priority and an effect.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from inductor_q import presets
from inductor_q.exc import (
    InvalidOptionValue,
    UnknownOp,
    UnknownOption,
    UnknownPass,
    UnknownProvider,
)
from inductor_q.presets import FrozenMap
from inductor_q.resolved import Compute, Loss, Numerics

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def from_text(name: str, text: str) -> Any:
    """Translate a variable's text. Only booleans need that; other parsers take text as it is."""
    if name in ("qfuse.strict", "qfuse.offload") and text.lower() in _TRUE + _FALSE:
        return text.lower() in _TRUE
    return text


@dataclass(frozen=True)
class Toggles:
    """Switch passes on and off; `exact` when everything else is off."""

    values: Mapping[str, bool]
    exact: bool = False


def _parse_text(expected: str) -> Callable[[str, Any, str], str]:
    def parse(name: str, value: Any, source: str) -> str:
        if isinstance(value, str):
            return value
        raise InvalidOptionValue(name=name, value=value, expected=expected, source=source)

    return parse


def _parse_one_of(*choices: str) -> Callable[[str, Any, str], Any]:
    def parse(name: str, value: Any, source: str) -> Any:
        if value in choices:
            return value
        expected = f"one of {', '.join(map(repr, choices))}"
        raise InvalidOptionValue(name=name, value=value, expected=expected, source=source)

    return parse


def _parse_report(name: str, value: Any, source: str) -> str:
    if isinstance(value, (str, os.PathLike)):
        return str(os.fspath(value))
    raise InvalidOptionValue(name=name, value=value, expected="a path", source=source)


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_memory(name: str, value: Any, source: str) -> int | float:
    """Read a number of bytes (22e9, "22GB", "20.5 GiB"), or a share of the device (0.9, "90%")."""
    found = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*(%|[KMGT]?i?B)?", str(value).strip(), re.IGNORECASE)
    try:
        number = float(found[1]) if found and not isinstance(value, bool) else 0.0
    except ValueError:
        number = 0.0
    unit = ((found and found[2]) or "").upper()
    share = number / 100 if unit == "%" else number
    if 0 < share <= 1 and unit in ("", "%"):
        return share
    if unit != "%" and 1 <= number * _UNITS[unit] < math.inf:
        return int(number * _UNITS[unit])
    expected = (
        'an amount of memory such as "22GB", "20GiB", a number of bytes, or a share from 0 to 1'
    )
    raise InvalidOptionValue(name=name, value=value, expected=expected, source=source)


def _parse_bool(name: str, value: Any, source: str) -> bool:
    if isinstance(value, bool):
        return value
    expected = "1 or 0" if source else "True or False"
    raise InvalidOptionValue(name=name, value=value, expected=expected, source=source)


def parse_passes(name: str, value: Any, source: str) -> Toggles:
    """Read passes from a dict of name -> bool, or from names as a list or text.

    "all" and "none" work as they read. Plain names alone are the exact list; a sign anywhere
    ("fold_lora,-extend_k") makes all of them changes to the default.
    """
    known, given = pass_names(), value
    if value in ("all", "none"):
        return Toggles(dict.fromkeys(known, value == "all"))
    if isinstance(value, str):
        value = [item.strip() for item in value.split(",") if item.strip()]
    if isinstance(value, Mapping):
        toggles, exact = dict(value), False
    elif isinstance(value, (list, tuple, set, frozenset)) and all(
        isinstance(x, str) for x in value
    ):
        toggles = {item.lstrip("+-"): not item.startswith("-") for item in value}
        exact = not any(item.startswith(("+", "-")) for item in value)
        if not value and isinstance(given, str):  # "none" switches all off
            toggles = {"": None}
    else:
        toggles, exact = {"": None}, False
    if not all(isinstance(on, bool) for on in toggles.values()):
        expected = (
            "a dict of pass names to True or False, a list of names, or 'fold_lora,-extend_k'"
        )
        raise InvalidOptionValue(name=name, value=given, expected=expected, source=source)
    for item in toggles:
        if item not in known:
            raise UnknownPass(name=str(item), known=known, source=source)
    return Toggles(toggles, exact)


def parse_kernels(name: str, value: Any, source: str) -> dict[str, str]:
    """Read providers from {"dequantize": "triton"} or "dequantize=triton"."""
    original = value
    if isinstance(value, str):
        pairs = [item.partition("=") for item in value.split(",") if item.strip()]
        value = {op.strip(): provider.strip() or None for op, _, provider in pairs}
    if not isinstance(value, Mapping) or not all(isinstance(x, str) for x in value.values()):
        expected = "a dict of ops to provider names, or 'dequantize=triton'"
        raise InvalidOptionValue(name=name, value=original, expected=expected, source=source)
    known = providers()
    for op, provider in value.items():
        if op not in known:
            raise UnknownOp(name=str(op), known=tuple(known), source=source)
        if provider != "auto" and provider not in known[op]:
            raise UnknownProvider(name=provider, op=op, known=known[op], source=source)
    return dict(value)


def _parse_patterns(name: str, value: Any, source: str) -> tuple[str, ...]:
    """Read shell patterns from a list or from a text with commas."""
    items = value.split(",") if isinstance(value, str) else value
    if isinstance(items, (list, tuple)) and all(isinstance(item, str) for item in items):
        return tuple(item.strip() for item in items if item.strip())
    expected = "a list of patterns of module paths, or a text as '*.down_proj,layers.0.*'"
    raise InvalidOptionValue(name=name, value=value, expected=expected, source=source)


def _parse_thresholds(name: str, value: Any, source: str) -> dict[str, int]:
    """Read thresholds from {"extend_k.min_rows": 512} or "extend_k.min_rows=512"."""
    original = value
    if isinstance(value, str):
        pairs = [item.partition("=") for item in value.split(",") if item.strip()]
        value = {k.strip(): int(v) if v.strip().isdecimal() else None for k, _, v in pairs}
    if not isinstance(value, Mapping) or not all(type(x) is int for x in value.values()):
        expected = "a dict of threshold names to integers, or 'extend_k.min_rows=512'"
        raise InvalidOptionValue(name=name, value=original, expected=expected, source=source)
    for item in value:
        if item not in presets.THRESHOLDS:
            raise UnknownOption(name=f"{name}[{item}]", known=(*presets.THRESHOLDS,), source=source)
    return dict(value)


@dataclass(frozen=True)
class Option:
    help: str
    parse: Callable[[str, Any, str], Any]  # (name, value, source) -> value, or one of our errors
    variable: str = ""  # of the environment: the default

    def __str__(self) -> str:
        return f"{self.help} (default from {self.variable})" if self.variable else self.help


OPTIONS: Mapping[str, Option] = FrozenMap(
    {
        "qfuse.preset": Option(
            '"auto" (what `qfuse tune` measured here, or by the exact architecture of the device), '
            'the name of a preset, the path of a tuned one, or "none"',
            _parse_text("the name of a preset"),
            "QFUSE_PRESET",
        ),
        "qfuse.mode": Option(
            "a mode of torch.compile, to use together with other options",
            _parse_text("the name of a mode"),
        ),
        "qfuse.passes": Option(
            'passes by name: {"extend_k": False}, ["canonicalize", "keep_packed"] for just these, '
            'or "fold_lora,-extend_k"',
            parse_passes,
            "QFUSE_PASSES",
        ),
        "qfuse.numerics": Option(
            '"strict" keeps the dtype of every GEMM as written, "default" may reorder and '
            'accumulate in fp32, "relaxed" may run fp32 adapters in the compute dtype',
            _parse_one_of(*get_args(Numerics)),
            "QFUSE_NUMERICS",
        ),
        "qfuse.loss": Option(
            'how a language model\'s loss is computed: "chunked" without having all logits at a '
            'time, "whole" as written, "auto" in chunks on a GPU, where there would be several',
            _parse_one_of(*get_args(Loss)),
            "QFUSE_LOSS",
        ),
        "qfuse.compute": Option(
            "how products with frozen weights are computed, forward and for the gradient of "
            'the input: "bf16" as written; "fp8" or "int8" in eight bits, with a scale for each '
            "token and each out-feature, which has an error of some percent",
            _parse_one_of(*get_args(Compute)),
            "QFUSE_COMPUTE",
        ),
        "qfuse.compute.exclude": Option(
            "layers that qfuse.compute leaves in 16 bits: patterns of module paths or of their "
            'ends, "*.down_proj,layers.0.*" or a list of them',
            _parse_patterns,
            "QFUSE_COMPUTE_EXCLUDE",
        ),
        "qfuse.memory": Option(
            'the memory that a training step may take on its device: "22GB", "20GiB", or a share '
            'of a GPU as "0.9"; what does not fit is computed again in backward',
            parse_memory,
            "QFUSE_MEMORY",
        ),
        "qfuse.offload": Option(
            "True: under qfuse.memory also keep tensors in the host's memory until backward, where "
            "the link is measured to hide the copies",
            _parse_bool,
            "QFUSE_OFFLOAD",
        ),
        "qfuse.kernels": Option(
            'the provider to prefer for an op: {"dequantize": "triton"}; "auto" by default',
            parse_kernels,
            "QFUSE_KERNELS",
        ),
        "qfuse.thresholds": Option(
            'sizes from which plans pay, over the preset: {"extend_k.min_rows": 512}',
            _parse_thresholds,
            "QFUSE_THRESHOLDS",
        ),
        "qfuse.report": Option(
            "a path: the report of each compile is written there as JSON",
            _parse_report,
            "QFUSE_REPORT",
        ),
        "qfuse.strict": Option(
            "True: a quantized weight that is not fused is an error, whoever packed it",
            _parse_bool,
            "QFUSE_STRICT",
        ),
    }
)


def pass_names() -> tuple[str, ...]:
    from inductor_q.passes import PIPELINE

    return tuple(item.name for item in PIPELINE)


def providers() -> dict[str, tuple[str, ...]]:
    from inductor_q.kernels import provider_names

    return provider_names()
