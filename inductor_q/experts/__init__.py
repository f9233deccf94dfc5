"""Mixture-of-experts layers on quantized experts, with LoRA. See docs/moe.md.

Importing this package imports nothing else: names are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inductor_q.experts.adapter import load_adapter as load_adapter
    from inductor_q.experts.adapter import save_adapter as save_adapter
    from inductor_q.experts.model import add_lora as add_lora
    from inductor_q.experts.model import quantize as quantize
    from inductor_q.experts.model import use_qfuse as use_qfuse
    from inductor_q.experts.stack import ExpertStack as ExpertStack
    from inductor_q.ops.routing import Routing as Routing
    from inductor_q.ops.routing import route as route

_PUBLIC = {
    "ExpertStack": "stack",
    "Routing": "routing",
    "add_lora": "model",
    "load_adapter": "adapter",
    "quantize": "model",
    "route": "routing",
    "save_adapter": "adapter",
    "use_qfuse": "model",
}

__all__ = [
    "ExpertStack",
    "Routing",
    "add_lora",
    "load_adapter",
    "quantize",
    "route",
    "save_adapter",
    "use_qfuse",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
