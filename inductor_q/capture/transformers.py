"""transformers: layers of experts, whose fused parameters others pack; FP8 in tiles, MXFP4."""

from __future__ import annotations

from torch import nn

from inductor_q.capture import mxfp4_experts
from inductor_q.capture.expert_layers import find_layers
from inductor_q.capture.library import Library, Packed

#: The flags of its layout that `use_experts_implementation` (v5) leaves on a layer of experts.
_FLAGS = ("num_experts", "has_gate", "has_bias", "is_transposed", "config")


def _holds_experts(module: nn.Module) -> bool:
    return all(hasattr(module, flag) for flag in _FLAGS)


#: Layers whose products quantize their input as well.
_FINE_GRAINED = ("FP8Linear", "FP8Experts")
BOTH_SIDES = (
    "transformers quantizes its input as well, and multiplies codes with codes; "
    "inductor_q.load_checkpoint loads the same checkpoint for products with the decoded weight"
)


def _packed(module: nn.Module, name: str) -> Packed | None:
    if type(module).__name__ == mxfp4_experts.EXPERTS:
        projection = name.removesuffix("_blocks")
        known = projection in mxfp4_experts.PROJECTIONS
        return mxfp4_experts.packed(module, projection) if known else None
    weight = module._parameters.get(name)
    if type(module).__name__ not in _FINE_GRAINED or weight is None or weight.itemsize > 1:
        return None
    return Packed("fp8", tuple(weight.shape), reason=BOTH_SIDES)


TRANSFORMERS = Library(
    name="transformers",
    packed=_packed,
    holds_experts=_holds_experts,
    expert_blocks=mxfp4_experts.blocks,
    find_experts=find_layers,
)
