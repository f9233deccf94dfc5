"""Adapters' products that are added where a product in FP8 lies, and summands that are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V

from inductor_q.lowerings.calls import qfuse_add_product
from inductor_q.ops import eight_bits
from inductor_q.ops.registry import define_ops
from inductor_q.passes.add_adapters import ADD_PRODUCT, add_adapter
from inductor_q.passes.graph import ADD, CAST, MM, MUL, VIEWS, arg, emit, tensor
from inductor_q.passes.products import as_product
from inductor_q.passes.sum_products import stack_inner
from tests.passes.test_quantize_products import BF16, compiled, error, layer, tokens
from tests.support.compiling import step

define_ops()
aten = torch.ops.aten


def traced(fn: Any, *args: Tensor) -> fx.Graph:
    made = torch.fx.experimental.proxy_tensor.make_fx(fn, tracing_mode="fake")(*args)
    return made.graph


def operands(rank: int = 8) -> list[Tensor]:
    """x, the weight, and an adapter's projection and B'."""
    shapes = ((2, 16, 64), (64, 48), (2, 16, rank), (rank, 48))
    return [torch.randn(shape) for shape in shapes]


def layer_of(x: Tensor, w: Tensor, p: Tensor, b: Tensor) -> Tensor:
    base = (x.view(-1, 64) @ w).view(2, 16, 48)
    return base + (p.view(-1, p.shape[-1]) @ b).view(2, 16, 48)


def other_way_round(x: Tensor, w: Tensor, p: Tensor, b: Tensor) -> Tensor:
    adapter = (p.view(-1, p.shape[-1]) @ b).view(2, 16, 48)
    return adapter + (x.view(-1, 64) @ w).view(2, 16, 48)


def matrices(x: Tensor, w: Tensor, p: Tensor, b: Tensor) -> Tensor:
    return x.view(-1, 64) @ w + p.view(-1, p.shape[-1]) @ b


def in_float32(x: Tensor, w: Tensor, p: Tensor, b: Tensor) -> Any:
    """As a model of TRL's adds, whose norms are in float32."""
    x, w, p, b = (t.bfloat16() for t in (x, w, p, b))
    base = (x.view(-1, 64) @ w).view(2, 16, 48)
    adapter = (p.view(-1, p.shape[-1]) @ b).view(2, 16, 48)
    return CAST(base, torch.float32) + CAST(adapter, torch.float32)


def widened_once(x: Tensor, w: Tensor, p: Tensor, b: Tensor) -> Any:
    """A sum in float32 of which one part alone is cast."""
    x, w, p, b = (t.bfloat16() for t in (x, w, p, b))
    return x.view(-1, 64) @ w + CAST(p.view(-1, p.shape[-1]) @ b, torch.float32)


def base_widened(x: Tensor, w: Tensor, p: Tensor, b: Tensor) -> Any:
    x, w, p, b = (t.bfloat16() for t in (x, w, p, b))
    return CAST(x.view(-1, 64) @ w, torch.float32) + p.view(-1, p.shape[-1]) @ b


def every_pair(x: Tensor, w: Tensor, p: Tensor, b: Tensor) -> Tensor:
    """Both products have one shape, and are shown so that each row is added to each."""
    base = (x.view(-1, 64) @ w).view(32, 1, 48)
    return base + (p.view(-1, p.shape[-1]) @ b).view(1, 32, 48)


def one_more_dimension(x: Tensor, w: Tensor, p: Tensor, b: Tensor) -> Tensor:
    return x.view(-1, 64) @ w + (p.view(-1, p.shape[-1]) @ b).view(1, 32, 48)


def base_read(x: Tensor, w: Tensor, p: Tensor, b: Tensor) -> Tensor:
    base = (x.view(-1, 64) @ w).view(2, 16, 48)
    return (base + (p.view(-1, p.shape[-1]) @ b).view(2, 16, 48)) * base.sum()


def adapter_read(x: Tensor, w: Tensor, p: Tensor, b: Tensor) -> Tensor:
    adapter = (p.view(-1, p.shape[-1]) @ b).view(2, 16, 48)
    return ((x.view(-1, 64) @ w).view(2, 16, 48) + adapter) * adapter.sum()


def scaled(x: Tensor, w: Tensor, p: Tensor, b: Tensor) -> Tensor:
    base = x.view(-1, 64) @ w
    return torch.add(base, p.view(-1, p.shape[-1]) @ b, alpha=2)


def otherwise_shaped(x: Tensor, w: Tensor, p: Tensor, b: Tensor) -> Tensor:
    return x.view(-1, 64) @ w + (p.view(-1, p.shape[-1]) @ b).sum(0, keepdim=True)


def wide(x: Tensor, w: Tensor, p: Tensor, b: Tensor) -> Tensor:
    """A sum of two products with weights: neither is an adapter's."""
    return x.view(-1, 64) @ w + x.view(-1, 64) @ (w * 2)


@pytest.mark.parametrize("fn, taken", [
    (layer_of, True),
    (other_way_round, True),
    (matrices, True),
    (in_float32, True),
    (base_widened, True),
    (widened_once, False),
    (every_pair, False),
    (one_more_dimension, False),
    (base_read, False),
    (adapter_read, False),
    (scaled, False),
    (otherwise_shaped, False),
    (wide, False),
])  # fmt: skip
def test_what_is_added_in_place(fn: Any, taken: bool) -> None:
    args = operands()
    graph = traced(fn, *args)
    products = graph.find_nodes(op="call_function", target=MM)
    base = next(n for n in products if n.meta["val"].shape[1] == 48 and inner(n) == 64)
    with V.set_fake_mode(base.meta["val"].fake_mode):
        add_adapter(graph, base, others=())
    stable_topological_sort(graph)
    graph.eliminate_dead_code()
    assert bool(graph.find_nodes(op="call_function", target=ADD_PRODUCT)) is taken
    module = fx.GraphModule(nn.Module(), graph)
    expected = fn(*args)
    is_coarse = fn in (in_float32, base_widened)
    coarse: Any = {"rtol": 2**-7, "atol": 2**-4} if is_coarse else {}
    torch.testing.assert_close(module(*args), expected, **coarse)  # shape and dtype as well


def b_scaled(x: Tensor, w: Tensor, p: Tensor, b: Tensor) -> Tensor:
    return x.view(-1, 64) @ w + p.view(-1, p.shape[-1]) @ (
        b.permute(1, 0).contiguous() * 3
    ).permute(1, 0)


def p_scaled(x: Tensor, w: Tensor, p: Tensor, b: Tensor) -> Tensor:
    return x.view(-1, 64) @ w + (p * 3).view(-1, p.shape[-1]) @ b


def both_scaled(x: Tensor, w: Tensor, p: Tensor, b: Tensor) -> Tensor:
    return x.view(-1, 64) @ w + (p * 6).view(-1, p.shape[-1]) @ (b * 0.5)


def scaled_read(x: Tensor, w: Tensor, p: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    scaled = b * 3
    return x.view(-1, 64) @ w + p.view(-1, p.shape[-1]) @ scaled, scaled


def by_a_tensor(x: Tensor, w: Tensor, p: Tensor, b: Tensor) -> Tensor:
    return x.view(-1, 64) @ w + p.view(-1, p.shape[-1]) @ (b * b[:, :1])


def b_written(x: Tensor, w: Tensor, p: Tensor, b: Tensor) -> Tensor:
    """Backward, if it read the input itself, would find what forward has put there."""
    y = x.view(-1, 64) @ w + p.view(-1, p.shape[-1]) @ (b * 3)
    torch.ops.aten.copy_.default(b, b + 1)
    return y


def b_written_below_a_view(x: Tensor, w: Tensor, p: Tensor, b: Tensor) -> Tensor:
    y = x.view(-1, 64) @ w + p.view(-1, p.shape[-1]) @ (b.permute(1, 0) * 3).permute(1, 0)
    torch.ops.aten.copy_.default(b, b + 1)
    return y


@pytest.mark.parametrize("fn, factor, scales", [
    (layer_of, 1.0, 0),
    (b_scaled, 3.0, 0),
    (p_scaled, 3.0, 0),
    (both_scaled, 3.0, 0),
    (scaled_read, 3.0, 1),
    (by_a_tensor, 1.0, 1),
    (b_written, 1.0, 1),
    (b_written_below_a_view, 1.0, 1),
])  # fmt: skip
def test_the_factor_of_an_adapter(fn: Any, factor: float, scales: int) -> None:
    """It is the op's, and no tensor is scaled for it."""
    args = operands()
    graph = traced(fn, *args)
    base = graph.find_nodes(op="call_function", target=MM)[0]
    with V.set_fake_mode(base.meta["val"].fake_mode):
        add_adapter(graph, base, others=())
    stable_topological_sort(graph)
    graph.eliminate_dead_code()
    (total,) = graph.find_nodes(op="call_function", target=ADD_PRODUCT)
    assert total.args[3] == factor
    assert len(graph.find_nodes(op="call_function", target=MUL)) == scales
    expected = fn(*[arg.clone() for arg in args])
    torch.testing.assert_close(fx.GraphModule(nn.Module(), graph)(*args), expected)


@pytest.mark.parametrize("factors, common", [((2, 2), 2.0), ((2, 1), 1.0), ((2, 0.5), 1.0)])
def test_adapters_of_one_factor_are_stacked_without_it(
    factors: tuple[float, float], common: float
) -> None:
    def sum_of_two(x: Tensor, w: Tensor, p: Tensor, b: Tensor) -> Tensor:
        rows = p.view(-1, p.shape[-1])
        one, other = (b * factor if factor != 1 else b for factor in factors)
        return rows @ one + rows.cos() @ other

    args = operands()
    graph = traced(sum_of_two, *args)
    (last,) = graph.find_nodes(op="call_function", target=ADD)
    found = [as_product(n) for n in graph.find_nodes(op="call_function", target=MM)]
    with V.set_fake_mode(last.meta["val"].fake_mode), graph.inserting_before(last):
        lhs, rhs, factor = stack_inner(graph, [p for p in found if p is not None], last)
        total = emit(graph, MM, (lhs, rhs), last)
    assert factor == common
    last.replace_all_uses_with(total)
    graph.eliminate_dead_code()
    scales = graph.find_nodes(op="call_function", target=MUL)
    assert len(scales) == (0 if factor != 1 else sum(f != 1 for f in factors))
    actual = fx.GraphModule(nn.Module(), graph)(*args) * factor
    torch.testing.assert_close(actual, sum_of_two(*args))


class Frozen(nn.Module):
    """Two products without adapters that are added, the second of few inner columns."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = (nn.Linear(k, 128, bias=False, dtype=BF16) for k in (64, 32))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        return torch.tanh(self.wide(x) + self.narrow(x[..., :32].cos()))


def test_a_frozen_product_that_is_added_is_no_adapter() -> None:
    outcome = compiled(Frozen(), tokens())
    (joint,) = outcome.joint
    assert outcome.report.in_eight_bits() == (4, 4)
    assert not joint.find_nodes(op="call_function", target=ADD_PRODUCT)


def inner(product: fx.Node) -> int:
    return int(tensor(arg(product, 0)).shape[1])


def test_a_layer_forward_and_backward() -> None:
    """Of both products of a layer in FP8 the sum alone is read."""
    block, x = layer(), tokens()
    expected, grads = step(block, x, module=block)
    outcome = compiled(block, x, codegen=True)
    (joint,) = outcome.joint
    sums = joint.find_nodes(op="call_function", target=ADD_PRODUCT)
    assert len(sums) == 2
    for total in sums:
        base = total.args[0]
        assert list(base.users) == [total]
    assert not [n for n in joint.find_nodes(op="call_function", target=ADD) if reads(n, MM)]
    assert error(outcome.output, expected) < 0.04
    for name, grad in grads.items():
        assert error(outcome.gradients[name], grad) < 0.05, name


def reads(node: fx.Node, target: Any) -> bool:
    below = node.all_input_nodes
    while below and below[0].target in VIEWS:
        below = below[0].all_input_nodes
    return any(n.target is target for n in below)


def test_in_int8_the_kernel_that_reads_the_sum_adds() -> None:
    outcome = compiled(layer(), tokens(), "int8")
    (joint,) = outcome.joint
    assert not joint.find_nodes(op="call_function", target=ADD_PRODUCT)


def test_a_bias_stays_between() -> None:
    """The bias is added in the kernel that reads the sum; an adapter's product would make it a
    kernel of its own."""
    outcome = compiled(layer(bias=True), tokens())
    (joint,) = outcome.joint
    sums = joint.find_nodes(op="call_function", target=ADD_PRODUCT)
    assert [n.meta["val"].dtype for n in sums] == [BF16] * len(sums)
    assert len(sums) == 1  # the gradient of x


def test_in_place_in_forward_and_backward(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the product that a GPU has, both graphs of a layer add in place."""

    def scaled_product(a: Tensor, b: Tensor, *scales: Any, dtype: torch.dtype) -> Tensor:
        scale_a, scale_b = scales
        scale_a = torch.ops.qfuse.materialize(scale_a)  # a CPU looks at strides that mean nothing
        if scale_b is None:
            scale_b = torch.ones((1, b.shape[1]), dtype=torch.float32)
        return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype)

    if device == "cpu":
        monkeypatch.setattr(eight_bits, "scaled_product", scaled_product)
    block, x = layer().to(device), tokens().detach().to(device).requires_grad_()
    expected, grads = step(block, x, module=block)
    with config.patch(fx_graph_cache=False):
        outcome, codes = run_and_get_code(compiled, block, x, codegen=True)
    assert [code.count(f"{qfuse_add_product.__name__}(") for code in codes] == [1, 1]
    assert ", 2.0, kind=" in codes[0], "alpha / r, and B as it is"
    assert error(outcome.output, expected) < 0.04
    for name, grad in grads.items():
        assert error(outcome.gradients[name], grad) < 0.05, name
