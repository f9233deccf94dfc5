"""Sums of products in eight bits that become one product, and sums that do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inductor_q import comparison, testing
from inductor_q.kernels import rounding
from inductor_q.passes.emit_eight_bits import REQUANTIZE
from inductor_q.passes.graph import CAT, backward_nodes
from inductor_q.passes.products import MATERIALIZE
from tests.passes.test_quantize_products import BF16, compiled, error, tokens
from tests.support.compiling import Compiled, step

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")


class Beside(nn.Module):
    """Layers over one input, with as many outputs each as given."""

    def __init__(self, *sizes: int, residual: bool = False, **settings: Any) -> None:
        super().__init__()
        settings = {"adapter_dtype": BF16, **settings}
        self.residual = residual
        self.layers = nn.ModuleList(
            testing.lora_linear(n, 64, seed=i, **settings) for i, n in enumerate(sizes)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x)
        with torch.autocast("cpu", BF16):
            results = [layer(h) for layer in self.layers]
        total = torch.tanh(torch.cat(results, -1))
        return total + h.repeat(1, 1, total.shape[-1] // 64) if self.residual else total


def backward_parts(outcome: Compiled) -> list[list[int]]:
    """Return the rows of the weights that each call decodes transposed."""
    (joint,) = outcome.joint
    calls = joint.find_nodes(op="call_function", target=REQUANTIZE)
    return [list(node.args[6:] and node.args[6]) for node in calls if node.args[5]]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("adapter_dtype", [BF16, torch.float32])
def test_gradients_of_one_input_are_one_product(adapter_dtype: torch.dtype, residual: bool) -> None:
    """Backward adds in 16 bits or in float32, and has one product, to which one is added."""
    block, x = Beside(96, 48, 48, residual=residual, adapter_dtype=adapter_dtype), tokens()
    expected, grads = step(block, x, module=block)
    outcome = compiled(block, x, codegen=True)
    assert outcome.applied["quantize_products"] == 6
    assert sorted(*backward_parts(outcome)) == [48, 48, 96]
    assert outcome.ops["amax"] == 1 + 3  # of the input, and of each gradient
    assert outcome.ops["qfuse.add_product"] == 3 + 1
    assert error(outcome.output, expected) < 0.04
    for name, grad in grads.items():
        assert error(outcome.gradients[name], grad) < 0.06, name


def test_a_sum_is_as_exact_as_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the input is no further from that of the same weights in 64 bits."""
    block, x = Beside(96, 48), tokens()
    layers: Any = testing.reference_model(block).layers

    def wide(x: Tensor) -> Tensor:
        return torch.tanh(torch.cat([layer(torch.tanh(x)) for layer in layers], -1))

    _, exact = step(wide, x.detach().double().requires_grad_())

    def off() -> float:
        return error(compiled(block, x, codegen=True).gradients["x0"], exact["x0"])

    together = off()
    monkeypatch.setattr("inductor_q.passes.quantize_products._sum_of", lambda *_: None)
    assert together < 1.05 * off()


def test_dropout_keeps_adapters_apart() -> None:
    """What it masks is no product: the weights' products alone are one."""
    outcome = compiled(Beside(96, 48, dropout=0.05), tokens())
    assert sorted(*backward_parts(outcome)) == [48, 96]
    assert outcome.ops["qfuse.add_product"] == 2  # forward


def test_int8_has_a_scale_for_each_gradient() -> None:
    """Its steps are of one size: a gradient that is smaller than another needs its own."""
    outcome = compiled(Beside(96, 48), tokens(), "int8")
    assert backward_parts(outcome) == [[], []]
    assert outcome.ops["_int_mm"] == 2 + 2


def test_a_small_gradient_beside_a_large_one() -> None:
    """In FP8 one scale for both costs nothing, though their shares of the sum are equal."""
    large, small = torch.randn(64, 64), torch.randn(64, 4096) / 8
    weights = torch.randn(64, 128), torch.randn(4096, 128)
    exact = large.double() @ weights[0].double() + small.double() @ weights[1].double()

    def off(*casts: tuple[Tensor, Tensor]) -> float:
        codes = torch.cat([codes.double() * scale.double() for codes, scale in casts], 1)
        return error(codes @ torch.cat(weights).double(), exact)

    dtype = torch.float8_e4m3fn
    apart = off(rounding.cast_rows(large, dtype), rounding.cast_rows(small, dtype))
    assert off(rounding.cast_together([large, small], dtype)) < 1.05 * apart


class CrossAttention(nn.Module):
    """Layers one after the other that all read one input, as a decoder's do an encoder's result."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            testing.lora_linear(64, 64, adapter_dtype=BF16, seed=i) for i in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        h, y = torch.tanh(x), torch.zeros_like(x)
        for layer in self.layers:
            y = torch.tanh(y + layer(h))
        return y


def test_a_sum_of_many_is_several_products() -> None:
    """Each has the adapters of its own gradients."""
    block, x = CrossAttention(6), tokens()
    _, grads = step(block, x, module=block)
    outcome = compiled(block, x, codegen=True)
    assert sorted(map(len, backward_parts(outcome))) == [2, 4]
    assert outcome.ops["qfuse.add_product"] == 6 + 2
    for name, grad in grads.items():
        assert error(outcome.gradients[name], grad) < 0.08, name


def test_weights_are_decoded_behind_the_last_gradient() -> None:
    """Else they are in memory while the gradients are made, which takes more of it than has to be
    there for the product."""
    (joint,) = compiled(CrossAttention(4), tokens()).joint
    backward = backward_nodes(joint)
    calls = joint.find_nodes(op="call_function", target=REQUANTIZE)
    [codes] = [node for node in calls if node.args[5]]
    written = joint.find_nodes(op="call_function", target=MATERIALIZE)
    gradients = [node.args[0] for node in written if node in backward]
    assert len(gradients) == 4 and all(gradient < codes for gradient in gradients)


def test_weights_of_two_formats_are_decoded_apart() -> None:
    block, x = Beside(96, 48), tokens()
    block.layers[1] = testing.lora_linear(48, 64, quant_type="fp4", adapter_dtype=BF16)
    _, grads = step(block, x, module=block)
    outcome = compiled(block, x, codegen=True)
    assert backward_parts(outcome) == [[], []]
    (joint,) = outcome.joint
    shapes = [tuple(n.meta["val"].shape) for n in joint.find_nodes(op="call_function", target=CAT)]
    assert (64, 144) in shapes  # codes side by side
    for name, grad in grads.items():
        assert error(outcome.gradients[name], grad) < 0.06, name


class Read(nn.Module):
    """Two layers over two inputs, whose gradients are added only after another use."""

    def __init__(self) -> None:
        super().__init__()
        self.q = testing.lora_linear(64, 64, adapter_dtype=BF16)
        self.k = testing.lora_linear(64, 64, adapter_dtype=BF16, seed=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.q(torch.tanh(x)) * self.k(torch.sigmoid(x)))


def test_gradients_of_two_inputs_stay_apart() -> None:
    outcome = compiled(Read(), tokens())
    assert backward_parts(outcome) == [[], []]
    assert outcome.ops["amax"] == 2 + 2


def test_a_comparison_has_the_product_of_each_layer() -> None:
    with comparison.comparing():
        outcome = compiled(Beside(96, 48), tokens())
    assert backward_parts(outcome) == [[], []]


def test_under_a_checkpoint() -> None:
    from torch.utils.checkpoint import checkpoint

    class Segment(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Beside(96, 48)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return result

    block, x = Segment(), tokens()
    _, grads = step(block, x, module=block)
    outcome = compiled(block, x)
    assert sorted(*backward_parts(outcome)) == [48, 96]
    for name, grad in grads.items():
        assert error(outcome.gradients[name], grad) < 0.06, name
