"""A small network to quantize, a small language model, and what of them is packed."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

import inductor_q
from inductor_q import capture, testing

BF16 = torch.bfloat16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(64, 128, dtype=BF16)
        self.down = nn.Linear(128, 64, bias=False, dtype=BF16)
        self.lm_head = nn.Linear(64, 8, bias=False, dtype=BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lm_head(x + self.down(self.up(x).tanh()))
        return out


def packed(model: nn.Module) -> dict[str, str]:
    """The format of each packed layer, by name."""
    found = {}
    for name, module in model.named_modules():
        for held in ("weight", "qweight"):
            weight = capture.packed_weight(module, held)
            if weight is not None:
                assert weight.read is not None, weight
                found[name] = weight.read().format
    return found


def tiny(asked: Any, **how: Any) -> Any:
    torch.manual_seed(0)
    config = testing.tiny_qwen3_config(num_hidden_layers=1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16).eval()
    return inductor_q.quantize(model, asked, progress=False, **how)
