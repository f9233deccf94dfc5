"""Backward reads the scales of weights' rows that forward has computed, and no gradient changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import inductor_q
from inductor_q import testing
from inductor_q.passes import emit_eight_bits, quantize_products
from inductor_q.passes.emit_eight_bits import ROW_AMAX
from inductor_q.passes.graph import CAT, SLICE, tensor
from inductor_q.passes.recompute import is_kept
from tests.passes.test_frozen_weights import FP8, Lora
from tests.passes.test_keep_checkpointed import LAYERS, checkpointed
from tests.passes.test_keep_checkpointed import step as step_of_model
from tests.passes.test_quantize_products import BF16, layer, tokens
from tests.support.compiling import gradients, partition
from tests.support.thresholds import ANY_PRODUCT

OPTIONS = {**FP8, "qfuse.thresholds": {**ANY_PRODUCT, "fuse_dropout.min_rows": 1}}
AMAX = torch.ops.aten.amax.default


class Segment(nn.Module):
    """A checkpointed segment of two layers: backward computes the first one's result again."""

    def __init__(self, make: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = make(0), make(1)

    def forward(self, x: Tensor) -> Tensor:
        def both(x: Tensor) -> Tensor:
            result: Tensor = self.second(self.first(x))
            return result

        result: Tensor = checkpoint(both, x, use_reentrant=False)
        return result


class Beside(nn.Module):
    """Layers over one input, whose gradients of it are one product."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x)
        return torch.tanh(torch.cat([layer(h) for layer in self.layers], -1))


def packed(seed: int = 0) -> nn.Module:
    return layer(64, 64, seed=seed, dropout=0.1)


def projection(n: int = 64, **settings: Any) -> nn.Module:
    return testing.lora_linear(n, 64, adapter_dtype=BF16, dropout=0.1, **settings)


class Plain(Lora):
    """A frozen layer that reads its input as it is, as others beside it do."""

    def __init__(self, seed: int) -> None:
        super().__init__(64, 64)
        nn.init.normal_(self.base.weight, generator=torch.Generator().manual_seed(seed))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + (x @ self.lora_A.t()) @ self.lora_B.t()
        return y


def halves(seed: int = 0) -> nn.Module:
    return Beside(projection(32, seed=seed), projection(32, seed=seed + 9))


def dense(seed: int = 0) -> nn.Module:
    return Lora(64, 64)


def of_layer(make: Callable[[], nn.Module]) -> tuple[nn.Module, Callable[[Any], None]]:
    return make(), lambda call: call(tokens()).float().square().sum().backward()


def of_model(*, by_layers: bool) -> tuple[nn.Module, Callable[[Any], None]]:
    model = checkpointed(dropout=0.1)

    def run(call: Any) -> None:
        if by_layers:
            assert inductor_q.compile(model, options=OPTIONS, regions="layers") is model
        step_of_model(model if by_layers else call)

    return model, run


@dataclass(frozen=True)
class Case:
    make: Callable[[], tuple[nn.Module, Callable[[Any], None]]]
    kernels: int
    """That find the largest numbers of weights' rows."""
    vectors: int
    """That backward reads: those of q, k and v are one, and those of gate and up. (The gradient of
    the first input is not wanted, where the first q, k and v would be one.)"""


CASES = {
    "a layer": Case(lambda: of_layer(packed), 1, 1),
    "a segment": Case(lambda: of_layer(lambda: Segment(packed)), 2, 2),
    "a model's segments": Case(lambda: of_model(by_layers=False), 4 * LAYERS + 2, 4 * LAYERS + 2),
    "a model's layers": Case(lambda: of_model(by_layers=True), 4, 4),
    "a frozen layer": Case(lambda: of_layer(dense), 1, 1),
    "a segment of frozen layers": Case(lambda: of_layer(lambda: Segment(dense)), 2, 2),
    "layers": Case(lambda: of_layer(halves), 1, 1),
    "a segment of layers": Case(lambda: of_layer(lambda: Segment(halves)), 2, 2),
    "two formats": Case(
        lambda: of_layer(lambda: Beside(projection(), projection(quant_type="fp4"))), 2, 1
    ),
    "frozen layers": Case(lambda: of_layer(lambda: Beside(Plain(0), Plain(1), Plain(2))), 3, 1),
    "frozen and packed": Case(lambda: of_layer(lambda: Beside(projection(), Plain(0))), 2, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_backward_reads_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    found = []
    for kept in (True, False):
        if not kept:
            monkeypatch.setattr(emit_eight_bits, "keep_once", lambda *_, make: make())
        model, run = case.make()
        torch.manual_seed(5)
        forward, backward = partition(run, model, OPTIONS)[:2]
        assert len(row_maxima(forward)) == case.kernels
        # functorch keeps the largest number of a row by itself, but not of a checkpointed segment.
        assert bool(row_maxima(backward)) is not (
            kept or name in ("a frozen layer", "frozen layers")
        )
        found.append(gradients({}, model))
        if kept:
            given = backward.find_nodes(op="placeholder")
            scales = [tensor(n) for n in given if is_kept(n)]
            assert len(scales) == case.vectors
            assert {(scale.dtype, scale.dim()) for scale in scales} == {(torch.float32, 1)}
            assert torch.float8_e4m3fn not in {tensor(n).dtype for n in given}, "codes"
            assert not of_rows(backward, CAT), "copies of scales"
            # What is joined is written in its place: nothing else reads it.
            parts = [part for whole in of_rows(forward, CAT) for part in whole.all_input_nodes]
            assert all(len(part.users) == 1 for part in parts)
    assert found[0].keys() == found[1].keys() and found[0]
    for key, grad in found[0].items():
        assert torch.equal(grad, found[1][key]), key


@pytest.mark.parametrize(
    "name", ["layers", "a segment of layers", "two formats", "frozen layers", "frozen and packed"]
)
def test_a_product_of_forward_reads_its_part(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No number changes against scales of its own."""
    found = []
    for apart in (False, True):
        if apart:
            monkeypatch.setattr(quantize_products, "weight_key", id)
        model, run = CASES[name].make()
        torch.manual_seed(5)
        forward = partition(run, model, OPTIONS)[0]
        assert bool(of_rows(forward, SLICE)) is not apart
        found.append(gradients({}, model))
    assert found[0].keys() == found[1].keys() and found[0]
    for key, grad in found[0].items():
        assert torch.equal(grad, found[1][key]), key


def of_rows(graph: fx.Graph, target: Any) -> list[fx.Node]:
    """Find what joins scales of rows to one vector, or reads a part of it."""
    found = graph.find_nodes(op="call_function", target=target)
    return [n for n in found if (tensor(n).dtype, tensor(n).dim()) == (torch.float32, 1)]


def row_maxima(graph: fx.Graph) -> list[fx.Node]:
    """Find what the scales of weights follow from."""
    plain = [n for n in graph.find_nodes(op="call_function", target=AMAX) if of_weight(n)]
    return [*graph.find_nodes(op="call_function", target=ROW_AMAX), *plain]


def of_weight(node: fx.Node) -> bool:
    while len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node.op == "placeholder" and tensor(node).shape == (64, 64) and "primals" in node.name
