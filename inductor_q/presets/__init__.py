"""Presets by exact architecture: PRESETS holds them, and select() finds the one of a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from inductor_q.exc import UnknownPreset
from inductor_q.presets import tuned
from inductor_q.presets.generic import CPU, GENERIC, NONE
from inductor_q.presets.nvidia import NVIDIA
from inductor_q.presets.preset import MAPPINGS, NEVER, THRESHOLDS, Entry, FrozenMap, Preset

if TYPE_CHECKING:
    import torch  # `qfuse presets` answers without it

__all__ = [
    "MAPPINGS",
    "NEVER",
    "NONE",
    "PRESETS",
    "THRESHOLDS",
    "Entry",
    "FrozenMap",
    "Preset",
    "select",
    "shipped",
]

PRESETS: Mapping[str, Preset] = FrozenMap({p.name: p for p in (*NVIDIA, CPU, GENERIC)})


def select(
    device: torch.device,
    name: str = "auto",
    *,
    source: str = "",
    check: Callable[[Preset], None] = lambda preset: None,
) -> Preset:
    """Return the preset of that name, and why this one.

    "auto" is the one that `qfuse tune` measured for this device, torch and version, or else that of
    the exact architecture; a name that ends in .json is the file of a tuned preset. One for which
    `check` raises is ignored by "auto", with a warning.

    Raises:
        UnknownPreset, UnreadablePreset: there is none of that name.
    """
    if name == "auto":
        return tuned.find(device, check) or shipped(device)
    if name == "none":
        return replace(NONE, reason="asked for by name")
    if name.endswith(".json"):
        place, preset = tuned.read(Path(name))
        return replace(preset, reason=f"asked for by the path {name}, measured on {place}")
    if name not in PRESETS:
        raise UnknownPreset(name=name, known=tuple(PRESETS), source=source)
    return replace(PRESETS[name], reason=f"asked for by name on {_architecture(device)[0]}")


def shipped(device: torch.device) -> Preset:
    """Return the preset of the exact architecture, and why this one.

    Nothing is guessed between architectures: another capability of the same family, an AMD device
    that reports the same numbers, or a device of another type get "generic".
    """
    arch, why_generic = _architecture(device)
    if why_generic:
        return replace(GENERIC, reason=why_generic)
    return replace(PRESETS[arch], reason=f"the device is {_model(device)}, {arch}")


def _architecture(device: torch.device) -> tuple[str, str]:
    """Return the architecture's name, and why it has no preset ("" when it has one)."""
    if device.type == "cpu":
        return "cpu", ""
    if device.type != "cuda":
        return device.type, f"no measurement exists for devices of type {device.type}"
    import torch

    if torch.version.hip is not None:  # (9, 0) is gfx90a there, not sm_90
        name = str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
        return name, f"no measurement exists for AMD {name} ({_model(device)})"
    major, minor = torch.cuda.get_device_capability(device)
    name = f"sm_{major}{minor}"
    if name in PRESETS:
        return name, ""
    return name, f"no measurement exists for compute capability {major}.{minor} ({_model(device)})"


def _model(device: torch.device) -> str:
    import torch

    return "a CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
