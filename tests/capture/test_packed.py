"""What counts as a packed weight: of every library, in a module and in the graph that reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from inductor_q.capture.dynamo import input_sources, is_quantized, packed_weights
from inductor_q.capture.packed import packed_tensors
from tests.support.packed import (
    BF16,
    Experts,
    Fp8,
    Gptq,
    bnb_4bit,
    bnb_8bit,
    ours,
    torchao_int8,
)


class Positions(nn.Module):
    """SwinV2's attention: a table of indices beside a learned scale."""

    index: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.ones(1, dtype=BF16))
        self.table = nn.Parameter(torch.randn(8, dtype=BF16))
        self.register_buffer("index", torch.arange(64 * 64).reshape(64, 64) % 8)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.logit_scale @ self.table[self.index]


class Mask(nn.Module):
    """A mask in bytes, as GPT-2 has it, or signed."""

    mask: Tensor

    def __init__(self, dtype: torch.dtype = torch.uint8) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(64, 64, dtype=dtype).tril())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.mask.to(x.dtype)


class Int8(nn.Module):
    """Codes in a buffer, under a scale that the code has."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(64, 64, dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype) * 0.01)


PACKED: dict[str, Callable[[], nn.Module]] = {
    "nf4": bnb_4bit,
    "nf4 stored as bf16": lambda: bnb_4bit(quant_storage=BF16),
    "int8": bnb_8bit,
    "torchao": torchao_int8,
    "gptq": Gptq,
    "fp8": Fp8,
    "int8 in a buffer": Int8,
    "kbit, scales in bytes": ours,
    "kbit, scales in fp16": lambda: ours(3, "fp16"),
    "experts": lambda: Experts("nf4_b64_nested"),
    "experts in k bits": lambda: Experts("kbit3_e4m4"),
}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "positions": Positions,
    "mask": Mask,
    "signed mask": lambda: Mask(torch.int8),
    "dense": lambda: nn.Linear(64, 64, dtype=BF16),
}


def in_graph(module: nn.Module) -> tuple[tuple[str, ...], bool]:
    """The packed weights of the graph that `module` makes inside of another, and whether it is
    quantized at all."""
    found = []

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        weights = packed_weights(gm, input_sources(gm), example_inputs)
        found.append((weights, is_quantized(gm, weights)))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(nn.Sequential(module), backend=backend)(torch.ones(8, 64, dtype=BF16))
    ((weights, quantized),) = found
    return weights, quantized


@pytest.mark.parametrize("make", PACKED.values(), ids=PACKED)
def test_packed_weights(make: Callable[[], nn.Module]) -> None:
    """One in the modules and one in the graph, whoever packed it."""
    module = make()
    held = [name for m in module.modules() for name, _ in packed_tensors(m)]
    assert held in (["weight"], ["qweight"])
    layer = "0.up_proj" if isinstance(module, Experts) else "0"
    assert in_graph(module) == ((layer,), True)


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_what_is_no_packed_weight(make: Callable[[], nn.Module]) -> None:
    """Indices, masks and values: a model that has them is left to Inductor."""
    module = make()
    assert not [name for m in module.modules() for name, _ in packed_tensors(m)]
    assert in_graph(module) == ((), False)


def test_several_weights_of_one_module() -> None:
    module = nn.Module()
    for name in ("gate_up_proj", "down_proj"):
        codes = torch.zeros(2, 8, 8, dtype=torch.uint8)
        module.register_parameter(f"{name}_blocks", nn.Parameter(codes, requires_grad=False))
        scales = nn.Parameter(codes[..., 0].clone(), requires_grad=False)
        module.register_parameter(f"{name}_scales", scales)
    names = [name for name, _ in packed_tensors(module)]
    assert names == ["gate_up_proj_blocks", "down_proj_blocks"]
