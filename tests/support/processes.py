"""Set the environment of processes that tests start, so that they see what this one sees."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

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


#: Formats of a test in the interpreter: a few, of other packing, codec and scale each; or all.
FEW_OR_ALL = [
    pytest.param(
        ("nf4_b64_nested", "kbit3_e4m4", "int4_plain_g32", "int4_tiles_g32", "mxfp8_e4m3"),
        id="few formats",
    ),
    pytest.param((), id="every format", marks=pytest.mark.slow),
]


def asked_for(names: Iterable[str]) -> list[str]:
    """Return which of `names` are on the command line; without any there, all."""
    return [name for name in names if name in sys.argv[1:] or not sys.argv[1:]]


def interpreted(module: str, *arguments: str) -> list[int]:
    """Run `tests.support.<module>` under Triton's interpreter; return the counts that it prints.

    It has a process of its own, since Triton reads the variable once.
    """
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", f"tests.support.{module}", *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=580,
    )
    if "interpreter cannot loop" in run.stderr:
        pytest.skip(run.stderr.splitlines()[-1])
    if "only 0-dimensional arrays can be converted" in run.stderr:  # Triton 3.6 with NumPy 2.4
        pytest.skip("this Triton's interpreter cannot loop with this NumPy")
    assert run.returncode == 0, run.stderr[-3000:]
    return [int(count) for count in run.stdout.split()]


def _inherited() -> list[str]:
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
