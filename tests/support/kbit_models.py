"""Make small models for k-bit tests, dense and packed, and compare what two of them must share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from inductor_q import kbit

KBITS = (2, 3, 4, 5)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


class Model(nn.Module):
    """Chain an embedding, two blocks and a head, tied or not; one buffer is in no state dict."""

    positions: Tensor

    def __init__(self, width: int = 32, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.lm_head = nn.Linear(width, 40, bias=False)
        # No linspace: a process in which transformers first made a model under the meta device,
        # where it replaces that function, makes one on the CPU under every device.
        positions = torch.arange(width, dtype=torch.float32) / (width - 1)
        self.register_buffer("positions", positions, persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.lm_head(x)
        return y


def model(dtype: torch.dtype = torch.bfloat16, *, tied: bool = False, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(tied=tied).to(dtype)


def quantized(k: int = 3, absmax: str = "e4m4", **rest: Any) -> Model:
    made = model(**rest)
    kbit.quantize_model(made, k, absmax=absmax, progress=False)
    return made


IDS = torch.arange(24).reshape(2, 12)
LAYERS = ["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"]


def packed(m: nn.Module) -> dict[str, kbit.KBitLinear]:
    return {name: x for name, x in m.named_modules() if isinstance(x, kbit.KBitLinear)}


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    mine, theirs = one.state_dict(), other.state_dict()
    assert list(mine) == list(theirs)
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def unchanged(m: nn.Module, call: Callable[[], Any]) -> None:
    """Assert that after an error the same modules hold the same tensors."""
    modules, state = dict(m.named_modules()), m.state_dict(keep_vars=True)
    values = copy.deepcopy(m.state_dict())
    call()
    assert dict(m.named_modules()) == modules
    for name, tensor in m.state_dict(keep_vars=True).items():
        assert tensor is state[name], name
        assert tensor.is_meta or torch.allclose(tensor, values[name], 0, 0, equal_nan=True), name
