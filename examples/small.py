"""Models so small that the GPU waits for the host to launch their kernels, for `qfuse tune`.

    qfuse tune --model examples.small:qwen3_0_6b
    qfuse tune --model examples.small:qwen3_0_6b_quarter --budget 9m
    qfuse tune --model examples.small:qwen3_5_0_8b_sixth --budget 20m
    qfuse tune --model examples.small:toy

They are QLoRA models with random weights: NF4, and LoRA of rank 16 on the projections of attention
and MLP, prepared as PEFT does it. `qfuse tune` trains them on 2 x 512 tokens a step (2 x 64 on a
CPU).
"""

from __future__ import annotations

from typing import Any

import torch

from inductor_q import testing


def qwen3_0_6b(layers: int = 28) -> Any:
    """Return a model of Qwen3-0.6B's shapes."""
    return _qlora(testing.qwen3_0_6b_config(layers))


def qwen3_0_6b_quarter() -> Any:
    """Return a model of a quarter of Qwen3-0.6B's layers, which compiles sooner."""
    return qwen3_0_6b(7)


def qwen3_5_0_8b(layers: int = 24) -> Any:
    """Return a model of the shapes of Qwen3.5-0.8B's text model, most of whose layers are gated
    delta nets: as torch computes them their graphs are large, and compiling all takes minutes."""
    return _qlora(testing.qwen3_5_0_8b_config(layers))


def qwen3_5_0_8b_sixth() -> Any:
    """Return a model of a sixth of Qwen3.5-0.8B's layers: three delta nets and one of attention."""
    return qwen3_5_0_8b(4)


def toy() -> Any:
    """Return a model of two layers and 64 channels."""
    return _qlora(testing.tiny_qwen3_config(tie_word_embeddings=True))


def _qlora(config: Any) -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return testing.qlora_model(config, prepare=True, device=device)
