"""Check NVRTC, which compiles the CUDA sources of csrc/ at first use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from inductor_q.csrc import nvrtc
from inductor_q.diagnostics.checks.finding import Finding

INSTALL = "pip install -U nvidia-cuda-nvrtc"


def check() -> Iterator[Finding]:
    """Load the library, and check its version and that it knows the GPUs of this machine."""
    library = nvrtc.library()
    if isinstance(library, str):
        if torch.cuda.is_available():
            yield Finding("nvrtc", "warn", library, INSTALL)
        else:
            yield Finding("nvrtc", "ok", f"no GPU here to compile for; {library}")
        return
    packages = f"{Path(torch.__file__).parents[1]}{os.sep}"
    found = f"{'.'.join(map(str, library.version))}, {library.path.removeprefix(packages)}"
    unknown = [f"sm_{arch}" for arch in _architectures() if arch not in library.archs]
    if unknown:
        yield Finding("nvrtc", "warn", f"{found}; it does not know {', '.join(unknown)}", INSTALL)
    else:
        yield Finding("nvrtc", "ok", found)


def _architectures() -> list[int]:
    """Return the compile target for each GPU: the newest that its kind can run."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return []
    capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    return sorted({int(nvrtc.arch_of(each).removeprefix("sm_")) for each in capabilities})
