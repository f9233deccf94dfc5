"""Describe where a benchmark ran: the machine, the versions, the load."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
VERSIONS = ("torch", "triton", "bitsandbytes", "peft", "transformers", "numpy")


def machine(device: torch.device) -> dict[str, Any]:
    """Return the device's name and what bounds it."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return {
        "name": _cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def portable(text: str) -> str:
    """Leave out of a text the folder of this machine's packages, and addresses."""
    return re.sub(r"\S*/site-packages/| at 0x[0-9a-f]+", "", text)


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str | None]:
    """Return versions of what a number depends on; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in VERSIONS:
        found[name] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    found["torch"] = torch.__version__  # with the +cu130 that metadata may lack
    return found


def load() -> float | None:
    """Return the number of runnable processes, averaged over the last minute.

    Well above the thread count of the benchmark, CPU numbers are a neighbour's as well.
    """
    with contextlib.suppress(OSError):
        return os.getloadavg()[0]
    return None


def device_slug(device: torch.device) -> str:
    """Return the part of a result's file name: ``cpu``, ``h200``, ``rtx-4090``."""
    if device.type != "cuda":
        return device.type
    name = re.sub(r"nvidia|geforce", "", torch.cuda.get_device_name(device).lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")
