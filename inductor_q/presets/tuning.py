"""Measured entries of one machine, laid over the preset of its architecture.

`tuned/<arch>.json` holds {"inductor" | "passes" | "kernels" | "thresholds": {name: {"value": ...,
"evidence": ...}}}. A file is optional; a file that cannot be read as one is an error, since a typo
that silently restores the preset would look like a measurement that did not hold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from inductor_q.exc import InvalidTunedFile
from inductor_q.presets.preset import THRESHOLDS, Entry, Preset

DIRECTORY = Path(__file__).parent / "tuned"
SECTIONS = ("inductor", "passes", "kernels", "thresholds")


def load(path: Path) -> dict[str, dict[str, Entry]]:
    """The entries of the file by section, or InvalidTunedFile."""

    def wrong(problem: str) -> InvalidTunedFile:
        return InvalidTunedFile(path=str(path), problem=problem)

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise wrong(f"not JSON ({error})") from error
    if not isinstance(data, Mapping):
        raise wrong("expected an object of sections")
    sections: dict[str, dict[str, Entry]] = {}
    for section, entries in data.items():
        if section not in SECTIONS:
            raise wrong(f"unknown section {section!r}, expected {', '.join(SECTIONS)}")
        if not isinstance(entries, Mapping):
            raise wrong(f"{section}: expected an object of entries")
        for name, entry in entries.items():
            if problem := _problem(section, name, entry):
                raise wrong(f"{section}.{name}: {problem}")
            sections.setdefault(section, {})[name] = Entry(**entry, origin="tuned")
    return sections


def _problem(section: str, name: str, entry: Any) -> str:
    if not isinstance(entry, Mapping) or set(entry) != {"value", "evidence"}:
        return "expected {value, evidence}"
    value, evidence = entry["value"], entry["evidence"]
    if not (isinstance(evidence, str) and evidence.strip()):
        return "without evidence"
    if section == "thresholds":
        if name not in THRESHOLDS:
            return f"no such threshold, known: {', '.join(THRESHOLDS)}"
        if type(value) is not int or value < 0:
            return f"expected a number of rows, got {value!r}"
    if section == "passes" and type(value) is not bool:
        return f"expected true or false, got {value!r}"
    if section == "kernels" and type(value) is not str:
        return f"expected the name of a provider, got {value!r}"
    return ""


def overlay(preset: Preset, path: Path) -> Preset:
    """The preset with the file's entries over its own; the preset itself when there is no file."""
    if not path.is_file():
        return preset
    changed: dict[str, Any] = {
        section: {**getattr(preset, section), **entries} for section, entries in load(path).items()
    }
    return replace(preset, **changed, reason=f"{preset.reason}, with {path.name} of this machine")
