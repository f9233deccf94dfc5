"""Let NEFTune's noise be made in the graph.

NEFTune (arXiv 2310.05914) adds uniform noise to embeddings in training. The hook of transformers
draws it between bounds that are tensors, which Dynamo would have to read from the device: the graph
breaks there. Here the noise is drawn between -1 and 1, and scaled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def prepare_neftune(modules: Iterable[nn.Module]) -> None:
    """Put a hook that can be traced in the place of transformers' own, in a module that has one.

    The handle by which transformers removes its hook removes this one.
    """
    own = sys.modules.get("transformers.integrations.neftune")
    hook = getattr(own, "neftune_post_forward_hook", None)
    for module in modules:
        for key, found in module._forward_hooks.items():
            if found is hook:
                module._forward_hooks[key] = add_noise


def add_noise(module: Any, args: Any, output: Tensor) -> Tensor:
    """Add uniform noise of at most `alpha / sqrt(length * width)` to embeddings [B, length, width]
    in training."""
    if not module.training:
        return output
    numbers = torch.scalar_tensor(output.size(1) * output.size(2), device=output.device)
    noise = torch.empty_like(output).uniform_(-1.0, 1.0)
    largest: Tensor = module.neftune_noise_alpha * numbers.rsqrt()
    return output + noise * largest.to(output.dtype)
