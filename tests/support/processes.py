"""The environment of the processes that tests start: what this one sees, seen there as well."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment(*folders: Path, **variables: str) -> dict[str, str]:
    """Ours, with `folders` (this checkout, unless given) ahead of the inherited PYTHONPATH."""
    path = [str(folder) for folder in folders or (ROOT,)] + _inherited()
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}


def environment_without_checkout() -> dict[str, str]:
    """Ours, except that inductor_q is not found by PYTHONPATH: for tests of what is installed."""
    path = [folder for folder in _inherited() if not Path(folder, "inductor_q").is_dir()]
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**others, "PYTHONPATH": os.pathsep.join(path)} if path else others


def _inherited() -> list[str]:
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
