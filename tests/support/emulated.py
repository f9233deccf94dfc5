"""Builds CUDA sources for the CPU, with a header of this folder in the GPU's place."""

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("g++") or shutil.which("clang++")
# Hidden, for the reason at EXPORT in cuda.h.
FLAGS = "-std=c++17 -O1 -ffp-contract=off -fno-strict-aliasing -fvisibility=hidden -shared -fPIC -w"

needs_compiler = pytest.mark.skipif(
    COMPILER is None or sys.platform != "linux", reason="needs a C++ compiler and ucontext"
)


def built(folder: Path, lines: Sequence[str]) -> ctypes.CDLL:
    """The library of the C++ source `lines`, which is written and compiled in `folder`."""
    source, library = folder / "emulated.cpp", folder / "emulated.so"
    source.write_text("\n".join(lines))
    assert COMPILER is not None
    folders = [f"-I{ROOT / 'tests' / 'support'}", f"-I{ROOT / 'csrc'}"]
    command = [COMPILER, *FLAGS.split(), *folders, str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return ctypes.CDLL(str(library))
