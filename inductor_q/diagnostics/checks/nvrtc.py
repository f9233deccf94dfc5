"""NVRTC, which compiles CUDA C++ at run time: where it is and which version it is."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import torch

from inductor_q.diagnostics.checks.finding import Finding

INSTALL = "pip install nvidia-cuda-nvrtc"


def check() -> Iterator[Finding]:
    """Loads the first library found and asks it for its version."""
    places = candidates()
    if not places:
        why = "" if torch.cuda.is_available() else " (no GPU here to compile for)"
        yield Finding("nvrtc", "warn", f"not found{why}", INSTALL)
        return
    where, path = places[0]
    version = version_of(path)
    if not version:
        yield Finding("nvrtc", "warn", f"{path} does not load", INSTALL)
    else:
        yield Finding("nvrtc", "ok", f"{version}, {where}")


def candidates() -> list[tuple[str, str]]:
    """(whose, path) of every NVRTC library, in the order in which torch itself would look."""
    found: list[tuple[str, str]] = []
    for whose, folder in _folders():
        # Not libnvrtc-builtins, which the library loads itself, nor its .alt twin.
        names = sorted(p for p in folder.glob("libnvrtc*.so*") if _is_library(p.name))
        found += [(whose, str(path)) for path in names]
    system = ctypes.util.find_library("nvrtc")
    return [*found, ("of the system", system)] if system else found


def _folders() -> Iterator[tuple[str, Path]]:
    yield "bundled with torch", Path(torch.__file__).parent / "lib"
    spec = importlib.util.find_spec("nvidia")  # a namespace package: one place a wheel folder
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for folder in sorted(Path(place).glob("*/lib")):  # cuda_nvrtc/lib, since CUDA 13 cu13/lib
            yield "of the wheel nvidia-cuda-nvrtc", folder


def _is_library(name: str) -> bool:
    return "builtins" not in name and ".alt." not in name


def version_of(path: str) -> str:
    """What `nvrtcVersion` of that library says, "" where it cannot be loaded or asked."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    try:
        status = ctypes.CDLL(path).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    except (OSError, AttributeError):
        return ""
    return f"{major.value}.{minor.value}" if status == 0 else ""
