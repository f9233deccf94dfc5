"""transformers: layers of experts, whose fused parameters others pack; FP8 in tiles, MXFP4."""

from __future__ import annotations

from torch import nn

from inductor_q.capture import fp8_layers, mxfp4_experts
from inductor_q.capture.expert_layers import find_layers
from inductor_q.capture.library import Library, Packed

#: The flags of its layout that `use_experts_implementation` (v5) leaves on a layer of experts.
_FLAGS = ("num_experts", "has_gate", "has_bias", "is_transposed", "config")


def _holds_experts(module: nn.Module) -> bool:
    return all(hasattr(module, flag) for flag in _FLAGS)


def _packed(module: nn.Module, name: str) -> Packed | None:
    if type(module).__name__ == mxfp4_experts.EXPERTS:
        projection = name.removesuffix("_blocks")
        known = projection in mxfp4_experts.PROJECTIONS
        return mxfp4_experts.packed(module, projection) if known else None
    return fp8_layers.packed(module, name) if type(module).__name__ in fp8_layers.LEFT else None


TRANSFORMERS = Library(
    name="transformers",
    match=fp8_layers.match,
    packed=_packed,
    holds_experts=_holds_experts,
    expert_blocks=mxfp4_experts.blocks,
    find_experts=find_layers,
)
