"""A small model, compiled layer by layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import inductor_q
from inductor_q import testing
from tests.support.compiling import SMALL


def qwen3(layers: int = 2, **settings: Any) -> Any:
    """Return a model in which nothing is rounded to 16 bits, so that the order of products is all
    that differs from eager."""
    config = testing.tiny_qwen3_config(num_hidden_layers=layers)
    given = {"compute_dtype": torch.float32, "randomize_adapters": True}
    return testing.qlora_model(config, **{**given, **settings})


def layered(model: nn.Module, options: Any = SMALL) -> None:
    torch.compiler.reset()
    inductor_q.compile(model, options=options, regions="layers")
