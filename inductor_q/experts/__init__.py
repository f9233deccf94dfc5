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
    from inductor_q.experts.model import merge_lora as merge_lora
    from inductor_q.experts.model import quantize as quantize
    from inductor_q.experts.model import use_qfuse as use_qfuse
    from inductor_q.experts.sharding import clip_grad_norm_ as clip_grad_norm_
    from inductor_q.experts.sharding import parameters_of_rank as parameters_of_rank
    from inductor_q.experts.sharding import shard as shard
    from inductor_q.experts.stack import ExpertStack as ExpertStack
    from inductor_q.ops.routing import Routing as Routing
    from inductor_q.ops.routing import route as route

_PUBLIC = {
    "ExpertStack": "inductor_q.experts.stack",
    "Routing": "inductor_q.ops.routing",
    "add_lora": "inductor_q.experts.model",
    "clip_grad_norm_": "inductor_q.experts.sharding",
    "load_adapter": "inductor_q.experts.adapter",
    "merge_lora": "inductor_q.experts.model",
    "parameters_of_rank": "inductor_q.experts.sharding",
    "quantize": "inductor_q.experts.model",
    "route": "inductor_q.ops.routing",
    "save_adapter": "inductor_q.experts.adapter",
    "shard": "inductor_q.experts.sharding",
    "use_qfuse": "inductor_q.experts.model",
}

__all__ = [
    "ExpertStack",
    "Routing",
    "add_lora",
    "clip_grad_norm_",
    "load_adapter",
    "merge_lora",
    "parameters_of_rank",
    "quantize",
    "route",
    "save_adapter",
    "shard",
    "use_qfuse",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
