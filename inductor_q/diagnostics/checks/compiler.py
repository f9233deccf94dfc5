"""Check for a C++ compiler: Inductor on a CPU needs one, and it builds the kernel of csrc/."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import torch

from inductor_q.csrc import build
from inductor_q.diagnostics.checks.finding import Finding, Status

INSTALL = "apt-get install g++  # 11 or newer; or export CXX=/path/to/a/c++/compiler"


def check() -> Iterator[Finding]:
    """Build csrc/dequantize.cpp, or find it built, and load it."""
    from inductor_q.kernels import dequantize_cpp

    gpu = torch.cuda.is_available()
    failure: Status = "warn" if gpu else "fail"
    command = build.compiler()
    if not command:
        uses = "the dequantize kernel on a CPU" if gpu else "Inductor on a CPU"
        yield Finding("compiler", failure, f"no C++ compiler; {uses} needs one", INSTALL)
        return
    reason = dequantize_cpp.KERNEL.missing()
    if reason:
        yield Finding("compiler", failure, reason, INSTALL)
    else:
        found = f"{shlex.join(command)} builds csrc/{dequantize_cpp.SOURCE}"
        yield Finding("compiler", "ok", found)
