"""Set the environment of processes that tests start, so that they see what this one sees."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment(*folders: Path, **variables: str) -> dict[str, str]:
    """Return our environment, with `folders` (this checkout, unless given) ahead on PYTHONPATH."""
    path = [str(folder) for folder in folders or (ROOT,)] + _inherited()
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}


def environment_without_checkout() -> dict[str, str]:
    """Return our environment without inductor_q on PYTHONPATH, for tests of what is installed."""
    path = [folder for folder in _inherited() if not Path(folder, "inductor_q").is_dir()]
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**others, "PYTHONPATH": os.pathsep.join(path)} if path else others


def _inherited() -> list[str]:
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
