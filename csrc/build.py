"""Compile a C++ source of this folder at first use, cached by content.

The library lands in Inductor's cache folder under a name that hashes the source, the compiler and
its flags, and the headers beside it; it appears there by an atomic rename, so that processes may
race.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from inductor_q.files import replacing

FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC", "-std=c++17")


def compiler() -> list[str]:
    """Return the command of the C++ compiler: $CXX ("ccache g++" too), else g++, clang++ or []."""
    command = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    return shlex.split(command or "")


@functools.cache
def load(source: str) -> ctypes.CDLL | str:
    """Load the shared library built from `csrc/<source>`, or return why there is none."""
    cxx = compiler()
    if not cxx:
        return "no C++ compiler: set CXX or install g++"
    path = Path(__file__).with_name(source)
    try:  # a compiler that does not run, a cache folder that cannot be written, a broken library
        target = _target(path, cxx)
        if not target.exists():
            _compile(path, cxx, target)
        return ctypes.CDLL(str(target))
    except RuntimeError as error:
        return str(error)
    except OSError as error:
        return f"csrc/{source} was not built with {shlex.join(cxx)}: {error}"


def _target(path: Path, cxx: Sequence[str]) -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    version = subprocess.run([*cxx, "--version"], capture_output=True, text=True).stdout
    # -march=native: the same cache folder may be shared by machines with other processors.
    cpu = Path("/proc/cpuinfo")
    flags = cpu.read_text().partition("flags")[2].partition("\n")[0] if cpu.exists() else ""
    headers = (header.read_text() for header in sorted(path.parent.glob("*.h")))
    key = "\0".join((path.read_text(), *headers, version, *FLAGS, flags))
    digest = hashlib.sha256(key.encode()).hexdigest()[:20]
    return Path(cache_dir()) / "qfuse" / f"{path.stem}-{digest}.so"


def _compile(path: Path, cxx: Sequence[str], target: Path) -> None:
    """Build `target`.

    Raises:
        RuntimeError: the compiler failed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as scratch:
        command = [*cxx, *FLAGS, "-o", str(scratch), str(path)]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            error = run.stderr.strip()[-400:]
            raise RuntimeError(f"{shlex.join(cxx)} failed on {path.name}: {error}")
