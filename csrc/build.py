"""Compile a C++ source of this folder at first use, cached by content.

The library is kept (`inductor_q.kept`) under a name that hashes the source, the compiler and its
flags, the headers beside it and, where torch's are included, the version of torch. It is loaded
only if it is whole: a library that misses its end would end the process with SIGBUS.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from inductor_q import kept

FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC", "-std=c++17")


def compiler() -> list[str]:
    """Return the command of the C++ compiler: $CXX ("ccache g++" too), else g++, clang++ or []."""
    command = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    return shlex.split(command or "")


@functools.cache
def load(source: str, with_torch: bool = False, printed: str = "") -> ctypes.CDLL | str:
    """Load the shared library built from `csrc/<source>`, or return why there is none.

    Args:
        with_torch: whether it includes torch's headers and calls torch's libraries.
        printed: what it includes as QFUSE_PRINTED, whose integers wrap around.
    """
    cxx = compiler()
    if not cxx:
        return "no C++ compiler: set CXX or install g++"
    path = Path(__file__).with_name(source)
    flags = (*FLAGS, *(_torch_flags() if with_torch else ()), *(["-fwrapv"] if printed else []))
    try:  # a compiler that does not run, a folder without room
        name = _name(path, cxx, (*flags, printed))
        if kept.read(name) is not None:
            with contextlib.suppress(OSError):  # whole, but of libraries that have changed
                return ctypes.CDLL(str(kept.folder() / name))
        return _build(path, cxx, flags, name, printed)
    except RuntimeError as error:
        return str(error)
    except OSError as error:
        return f"csrc/{source} was not built with {shlex.join(cxx)}: {error}"


def _torch_flags() -> tuple[str, ...]:
    """Return what finds torch's headers and its libraries, which this process has loaded."""
    import torch

    root = Path(torch.__file__).parent
    folders = (f"-I{root / 'include'}", f"-L{root / 'lib'}")
    return (*folders, "-ltorch_cpu", "-lc10", f"-DQFUSE_TORCH={torch.__version__}")


def _build(
    path: Path, cxx: Sequence[str], flags: Sequence[str], name: str, printed: str
) -> ctypes.CDLL:
    """Compile the library, keep it where that can be done, and load it."""
    with tempfile.TemporaryDirectory() as folder:  # a library that is loaded may be removed
        built, header = Path(folder, name), Path(folder, "printed.h")
        header.write_text(printed)
        _compile(path, cxx, (*flags, f'-DQFUSE_PRINTED="{header}"'), built)
        return ctypes.CDLL(str(kept.keep(name, built.read_bytes()) or built))


def _name(path: Path, cxx: Sequence[str], flags: Sequence[str]) -> str:
    headers = (header.read_text() for header in sorted(path.parent.glob("*.h")))
    key = "\0".join((path.read_text(), *headers, *cxx, *flags, toolchain(cxx)))
    digest = hashlib.sha256(key.encode()).hexdigest()[:20]
    return f"{path.stem}-{digest}.so"


def toolchain(cxx: Sequence[str]) -> str:
    """Return a digest of the compiler's version and of the processor.

    -march=native: machines with other processors may share the folder.
    """
    version = subprocess.run([*cxx, "--version"], capture_output=True, text=True).stdout
    key = "\0".join((version, platform.machine(), *_processor()))
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _processor() -> list[str]:
    """Return what Linux says of what processors can do: x86's flags, or ARM's features and part."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    return sorted({line for line in lines if line.startswith(("flags", "Features", "CPU part"))})


def _compile(path: Path, cxx: Sequence[str], flags: Sequence[str], target: Path) -> None:
    """Build `target`.

    Raises:
        RuntimeError: the compiler failed.
    """
    command = [*cxx, "-o", str(target), str(path), *flags]  # libraries come last
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        said = run.stderr.strip()
        first = re.search(r"^\S+:\d+:\d+: (fatal )?error:", said, re.MULTILINE)
        error = said[first.start() :][:400] if first else said[-400:]  # the rest may follow from it
        raise RuntimeError(f"{shlex.join(cxx)} failed on {path.name}: {error}")
