"""Show the GPUs, and the preset that a compile on each would take."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from inductor_q.diagnostics.checks.finding import Finding
from inductor_q.exc import QfuseError


def check() -> Iterator[Finding]:
    """Show architecture and shared memory of each GPU, and the preset in force there and why."""
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.device("cuda", index)
            yield _gpu(device)
            yield preset(device)
        return
    if torch.version.cuda or torch.version.hip:
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
        yield Finding(
            "device",
            "warn",
            f"torch is built for {build} and sees no GPU; compiles run on the CPU",
            "nvidia-smi" if torch.version.cuda else "rocminfo",
        )
    else:
        yield Finding("device", "ok", "CPU: this is a CPU build of torch")
    yield preset(torch.device("cpu"))


def _gpu(device: torch.device) -> Finding:
    properties = torch.cuda.get_device_properties(device)
    shared = int(getattr(properties, "shared_memory_per_block_optin", 0))
    found = (
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{shared:,} B of shared memory a block, {properties.total_memory / 2**30:.0f} GiB"
    )
    if (properties.major, properties.minor) < (7, 0) and torch.version.hip is None:
        remedy = "torch.compile(model, backend='eager')  # or a GPU of capability 7.0 and newer"
        return Finding("device", "fail", f"{found}; Triton does not compile for it", remedy)
    return Finding("device", "ok", found)


def preset(device: torch.device) -> Finding:
    """Return the preset that `torch.compile(backend="qfuse")` would take on `device`, and why."""
    from inductor_q.options import resolve
    from inductor_q.presets.generic import GENERIC

    try:
        chosen = resolve(None, None, device=device).preset
    except QfuseError as error:  # a QFUSE_* variable that cannot be read
        return Finding("preset", "fail", str(error), "env | grep QFUSE_")
    if chosen.name == GENERIC.name:
        return Finding(
            "preset",
            "warn",
            f"{chosen.name}: {chosen.reason}",
            "export QFUSE_PRESET=NAME  # to borrow another's: qfuse presets",
        )
    return Finding("preset", "ok", f"{chosen.name}: {chosen.reason}")
