"""Find out what happened in a compile, and why."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inductor_q.diagnostics.checks import Finding as Finding
    from inductor_q.diagnostics.checks import check_environment as check_environment
    from inductor_q.diagnostics.checks import check_model as check_model
    from inductor_q.diagnostics.observation import Observation as Observation
    from inductor_q.diagnostics.observation import observe as observe

# Looked up on demand: `qfuse explain` observes a target that is to import torch itself.
_PUBLIC = {
    "Finding": "checks",
    "Observation": "observation",
    "check_environment": "checks",
    "check_model": "checks",
    "observe": "observation",
}

__all__ = ["Finding", "Observation", "check_environment", "check_model", "observe"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
