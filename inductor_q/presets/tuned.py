"""Presets that `qfuse tune` measured: files in the user's configuration folder, one a place.

A place is a device, a torch and a version of ours. "auto" takes the file of the place that it is
in, and no other: what was measured elsewhere says nothing here.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inductor_q.exc import QfuseError, UnreadablePreset
from inductor_q.files import write_whole
from inductor_q.log import warn_once
from inductor_q.presets.generic import CPU, GENERIC
from inductor_q.presets.nvidia import NVIDIA
from inductor_q.presets.preset import THRESHOLDS, Entry, Preset
from inductor_q.version import VERSION

if TYPE_CHECKING:
    import torch  # `qfuse presets` answers without it

SCHEMA_VERSION = 1
_KINDS = ("thresholds", "options", "kernels")  # of entries that a tuned preset sets
_BASES = {preset.name: preset for preset in (*NVIDIA, CPU, GENERIC)}


@dataclass(frozen=True)
class Place:
    """Say where a measurement holds."""

    device: str
    torch: str
    version: str

    def __str__(self) -> str:
        return f"{self.device}, torch {self.torch}, qfuse {self.version}"


def folder() -> Path:
    """Return the folder of what `qfuse tune` writes, which may not exist yet.

    For a user without a home, as in a container whose table has no such uid, it cannot exist.
    """
    config = os.environ.get("XDG_CONFIG_HOME", "").strip()
    if not config:
        home = os.path.expanduser("~")
        config = os.devnull if home == "~" else os.path.join(home, ".config")
    return Path(config) / "qfuse"


def place_of(device: torch.device) -> Place:
    """Return the place that this process is in, with that device."""
    import torch

    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{_processor()} ({torch.get_num_threads()} threads)"
    return Place(name, torch.__version__, VERSION)


def path_of(place: Place) -> Path:
    """Return the file of a place."""
    name = re.sub(r"[^\w.+]+", "-", f"{place.device} torch{place.torch} {place.version}")
    return folder() / "tuned" / f"{name.lower()}.json"


def write(path: Path, place: Place, preset: Preset, *, base: str) -> None:
    """Write the entries of a tuned preset, and the name of the preset that has all others."""
    shipped = _BASES[base]
    entries = {
        "thresholds": {
            name: asdict(entry)
            for name, entry in preset.thresholds.items()
            if entry != shipped.thresholds[name]
        },
        "options": {name: asdict(entry) for name, entry in preset.options.items()},
        "kernels": {op: asdict(entry) for op, entry in preset.kernels.items()},
    }
    document = {"qfuse_preset": SCHEMA_VERSION, **asdict(place), "base": base, **entries}
    write_whole(path, json.dumps({**document, "facts": list(preset.facts)}, indent=1) + "\n")


def read(path: Path) -> tuple[Place, Preset]:
    """Read a tuned preset, and where it was measured.

    Raises:
        UnreadablePreset: the file is not there, damaged, or no tuned preset.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, Mapping) or document.get("qfuse_preset") != SCHEMA_VERSION:
            raise ValueError(f"it is no tuned preset of version {SCHEMA_VERSION}")
        place = Place(*(_text(document[key]) for key in ("device", "torch", "version")))
        return place, _preset(document, place)
    except KeyError as error:
        raise UnreadablePreset(path=str(path), problem=f"it has no {error}") from error
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadablePreset(path=str(path), problem=str(error)) from error


def find(
    device: torch.device, check: Callable[[Preset], None] = lambda preset: None
) -> Preset | None:
    """Return the preset that was tuned for the place that we are in. A file that is damaged or
    foreign, or for whose preset `check` raises an error of ours, is ignored, with a warning."""
    if device.type not in ("cpu", "cuda"):
        return None
    here = place_of(device)
    path = path_of(here)
    if not os.path.exists(path):  # nor where the folder may not be read
        return None
    read_here = _read_or_warn(path, here, check)
    return read_here and read_here[1]


def everything() -> list[tuple[Path, Place, Preset]]:
    """Read all tuned presets of this user; those that cannot be read are warned of."""
    try:
        paths = sorted(path for path in (folder() / "tuned").iterdir() if path.suffix == ".json")
    except (FileNotFoundError, NotADirectoryError):
        paths = []
    except OSError as error:
        warn_once(f"tuned presets are ignored: {error}")
        paths = []
    return [(path, *found) for path in paths if (found := _read_or_warn(path))]


def _read_or_warn(
    path: Path,
    here: Place | None = None,
    check: Callable[[Preset], None] = lambda preset: None,
) -> tuple[Place, Preset] | None:
    try:
        place, preset = read(path)
        if here not in (None, place):
            raise UnreadablePreset(path=str(path), problem=f"it is for {place}, not {here}")
        check(preset)
    except UnreadablePreset as error:
        warn_once(f"a tuned preset is ignored: {error}")
        return None
    except QfuseError as error:
        unfit = UnreadablePreset(path=str(path), problem=str(error))
        warn_once(f"a tuned preset is ignored: {unfit}")
        return None
    return place, preset


def _preset(document: Mapping[str, Any], place: Place) -> Preset:
    base = _BASES.get(_text(document["base"]))
    if base is None:
        raise ValueError(f"its base is {document['base']!r}; expected {', '.join(_BASES)}")
    sections = {
        kind: {
            _text(name): Entry(value=entry["value"], evidence=_text(entry["evidence"]))
            for name, entry in document[kind].items()
        }
        for kind in _KINDS
    }
    for name, entry in sections["thresholds"].items():
        if name not in THRESHOLDS or type(entry.value) is not int:
            raise ValueError(f"{name}={entry.value!r} is no threshold")
    options = sections["options"]
    for name in options:
        if name.replace("-", "_").partition(".")[0] == "qfuse":
            raise ValueError(f"{name} is for the user to set: a preset has options of Inductor")
    return replace(
        base,
        name="tuned",
        thresholds={**base.thresholds, **sections["thresholds"]},
        options=options,
        kernels=sections["kernels"],
        losses={name: entry for name, entry in base.losses.items() if name not in options},
        min_memory={name: entry for name, entry in base.min_memory.items() if name not in options},
        facts=tuple(map(_text, document["facts"])),
        reason=f"measured by qfuse tune over {base.name}: {place}",
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
