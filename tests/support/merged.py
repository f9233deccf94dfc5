"""What a linear layer's weight is once an adapter of PEFT's has been merged into it."""

from __future__ import annotations

from typing import Any

import torch


def merged_by_hand(layer: Any, weight: torch.Tensor, *, dora: bool) -> torch.Tensor:
    """`weight + s B A` in float64; under DoRA its rows have the length that the adapter says."""
    a, b = (part["default"].weight.double() for part in (layer.lora_A, layer.lora_B))
    merged: torch.Tensor = weight.double() + layer.scaling["default"] * b @ a
    if dora:
        magnitude = layer.lora_magnitude_vector["default"].weight.double()
        merged *= (magnitude / merged.norm(dim=1)).unsqueeze(1)
    return merged
