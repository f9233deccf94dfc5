"""transformers: layers of experts, whose weights are fused parameters that others pack."""

from __future__ import annotations

from torch import nn

from inductor_q.capture.expert_layers import find_layers
from inductor_q.capture.library import Library

#: The flags of its layout that `use_experts_implementation` (v5) leaves on a layer of experts.
_FLAGS = ("num_experts", "has_gate", "has_bias", "is_transposed", "config")


def _holds_experts(module: nn.Module) -> bool:
    return all(hasattr(module, flag) for flag in _FLAGS)


TRANSFORMERS = Library(name="transformers", holds_experts=_holds_experts, find_experts=find_layers)
