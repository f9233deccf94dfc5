"""Layers that are almost what a pass looks for: the values stay those of eager, and no graph that
compiles without the passes fails with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inductor_q import testing
from inductor_q.backend import qfuse
from inductor_q.passes.extend_k import WRITTEN
from inductor_q.passes.fold_lora import WRITTEN as FORWARD_WRITES
from inductor_q.passes.graph import CHAINED
from tests.support.compiling import (
    SMALL,
    Compiled,
    compile_step,
    no_codegen,
    skip_unless_regions_chain,
    step,
)

bnb = pytest.importorskip("bitsandbytes")

BF16, FP32 = torch.bfloat16, torch.float32
N, K, R = 128, 64, 8
CLOSE = 0.015  # a few roundings to bf16 (2**-9 each) between the reordered sums


def linear(n: int = N, k: int = K) -> Any:
    generator = torch.Generator().manual_seed(11)
    return testing.quantized_linear((torch.randn(n, k, generator=generator) * k**-0.5).to(BF16))


class Layer(nn.Module):
    """A quantized layer, an adapter's A and B, and what `body` makes of them and tanh(x)."""

    def __init__(
        self, body: Callable[[Layer, Tensor], Tensor], *, n: int = N, adapter_dtype: Any = BF16
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(13)
        self.base = linear(n)
        a = torch.randn(R, K, generator=generator) * K**-0.5
        self.a = nn.Parameter(a.to(adapter_dtype))
        self.b = nn.Parameter((torch.randn(n, R, generator=generator) * R**-0.5).to(adapter_dtype))
        self.body = body

    def low(self, h: Tensor) -> Tensor:
        return h @ self.a.t() @ self.b.t()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(self, torch.tanh(x)))


def x_MK(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(shape or (2, 48, K), generator=generator).to(BF16).requires_grad_()


def same_as_eager(module: nn.Module, x: Tensor | None = None, **kwargs: Any) -> Compiled:
    x = x_MK() if x is None else x
    output, grads = step(module, x, module=module)
    result = compile_step(module, x, **kwargs)
    assert result.output.shape == output.shape and result.output.dtype == output.dtype
    assert testing.relative_error(result.output, output) < CLOSE
    assert result.gradients.keys() == grads.keys()
    for name, grad in grads.items():
        assert testing.relative_error(result.gradients[name], grad) < CLOSE, name
    return result


def twice(h: Tensor) -> Tensor:
    return torch.cat([h, h], -1)


# --- sums ---------------------------------------------------------------------------------------

SUMS: dict[str, Callable[[Layer, Tensor], Tensor]] = {
    "alpha": lambda m, h: torch.add(m.base(h), m.low(h), alpha=3),
    "a term plus a number": lambda m, h: m.base(h) + m.low(h) + (twice(h) + 1.0),
    "a term plus itself": lambda m, h: m.base(h) + m.low(h) + ((t := twice(h)) + t),
    "the layer broadcast": lambda m, h: m.base(h[:, :1].sin()) + m.low(h),
    "the adapter broadcast": lambda m, h: m.base(h) + m.low(h[:, :1].sin()),
    "the end of a projection": lambda m, h: (
        m.base(h) + (h.flatten(0, 1) @ m.a.t())[:, 2:].unflatten(0, (2, 48)) @ m.b[:, 2:].t()
    ),
    "the end of a matrix's projection": lambda m, h: (
        m.base(h.flatten(0, 1)) + (h.flatten(0, 1) @ m.a.t())[:, 2:] @ m.b[:, 2:].t()
    ),
    "overlapping parts of a projection": lambda m, h: (
        m.base(h.flatten(0, 1))
        + (p := h.flatten(0, 1) @ m.a.t())[:, :6] @ m.b[:, :6].t()
        + p[:, 4:] @ m.b[:, 4:].t()
    ),
    "a part of a projection beside all of it": lambda m, h: (
        m.base(h.flatten(0, 1))
        + (p := h.flatten(0, 1) @ m.a.t()) @ m.b.t()
        + p[:, 2:4] @ m.b[:, 2:4].t()
    ),
    "a few positions of a projection": lambda m, h: (
        m.base(h[:, :R].sin()) + (h @ m.a.t())[:, :R] @ m.b.t()
    ),
}


@pytest.mark.usefixtures("graph_or_code")
@pytest.mark.parametrize("name", SUMS)
def test_sums_that_are_almost_an_adapter(name: str) -> None:
    same_as_eager(Layer(SUMS[name]))


@pytest.mark.usefixtures("graph_or_code")
def test_a_sum_that_promotes_the_layer_is_refused() -> None:
    def body(m: Layer, h: Tensor) -> Tensor:
        return m.base(h) + m.low(h.float())  # type: ignore[no-any-return]

    result = same_as_eager(Layer(body, adapter_dtype=FP32))
    assert "extend_k" not in result.applied and result.reasons["extend_k"]


@pytest.mark.usefixtures("graph_or_code")
def test_an_adapter_of_another_layers_result_is_refused() -> None:
    """Both sums have the same quantized input, but one wide buffer would need its own product."""

    def body(m: Layer, h: Tensor) -> Tensor:
        first = m.base(h) + m.low(h)
        return first + torch.tanh(m.base(h) + m.low(torch.tanh(first)))  # type: ignore[no-any-return]

    result = same_as_eager(Layer(body, n=K))
    assert "an input of the wide product is computed from its result" in result.reasons["extend_k"]


@pytest.mark.usefixtures("graph_or_code")
def test_a_projection_by_a_projection_is_not_stacked() -> None:
    """`x @ (x' @ (x @ A'))`: two projections of x, one needed for the other."""

    def body(m: Layer, h: Tensor) -> Tensor:
        rows = h.flatten(0, 1)
        again = rows @ (rows.t() @ (rows @ m.a.t())) * 0.01
        return m.base(h) + again.sum(-1).unflatten(0, (2, 48)).unsqueeze(-1)  # type: ignore[no-any-return]

    result = same_as_eager(Layer(body))
    assert result.reasons["stack_adapters"] == {CHAINED: 1}


class GradientOfGradient(torch.autograd.Function):
    """`x @ A' + x @ B'`, where the gradient of B is computed from that of A."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ a.t() + x @ b.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        of_a = grad.t() @ x
        size = of_a.float().pow(2).mean().sqrt().to(BF16)
        return None, of_a, torch.tanh(grad + size).t() @ x


@pytest.mark.usefixtures("graph_or_code")
def test_a_gradient_computed_from_a_gradient_is_not_stacked() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weights = torch.randn(2, R, K, generator=torch.Generator().manual_seed(13)) * K**-0.5
            self.a, self.b = (nn.Parameter(w) for w in weights.to(BF16))
            self.base = linear(R)

        def forward(self, x: Tensor) -> Any:
            h = torch.tanh(x)
            low = GradientOfGradient.apply(h, self.a, self.b)  # type: ignore[no-untyped-call]
            return torch.tanh(self.base(h) + low)

    result = same_as_eager(Module(), x_MK(48, K).detach())
    assert result.reasons["stack_gradients"] == {CHAINED: 1}


# --- forward and what depends on a tangent ------------------------------------------------------


class ProjectsAgain(torch.autograd.Function):
    """`base(x) + x @ A' @ B'`, whose gradient of x projects x by a tangent in A's place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, layer: Any) -> Any:
        ctx.save_for_backward(x, a, b)
        ctx.layer = layer
        return layer(x) + x @ a.t() @ b.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, a, b = ctx.saved_tensors
        like_a = torch.tanh(grad[:R, :K])
        return torch.tanh(ctx.layer(x) + x @ like_a.t() @ b.t())[:, :K], a.sin(), b.sin(), None


@pytest.mark.usefixtures("graph_or_code")
def test_a_forward_product_joins_none_that_depends_on_a_tangent() -> None:
    """extend_k and stack_adapters laid them into one: forward was then without an input."""

    def body(m: Layer, h: Tensor) -> Tensor:
        y: Tensor = ProjectsAgain.apply(h, m.a, m.b, m.base)  # type: ignore[no-untyped-call]
        return y

    result = same_as_eager(Layer(body), x_MK(48, K))
    assert result.applied["extend_k"] == 2


def test_func_grad_over_an_adapter_that_requires_grad() -> None:
    """Its own backward is part of forward, and again has products with the adapter's weights."""
    module = testing.lora_linear(K, K, adapter_dtype=BF16)
    trained = {n: p.detach().clone() for n, p in module.named_parameters() if "lora_" in n}
    frozen = {n: p for n, p in module.named_parameters() if "lora_" not in n}

    def loss(adapter: dict[str, Tensor], x: Tensor) -> Tensor:
        y = torch.func.functional_call(module, {**frozen, **adapter}, (torch.tanh(x),))
        return y.tanh().float().pow(2).sum()  # type: ignore[no-any-return]

    x = x_MK(2, 4, K).detach()
    expected = torch.func.grad(loss)(trained, x)
    torch._dynamo.reset()
    compiled = torch.compile(torch.func.grad(loss), backend=qfuse, options=SMALL)
    with no_codegen():
        found = compiled({n: p.requires_grad_() for n, p in trained.items()}, x)
    for name, grad in expected.items():
        assert testing.relative_error(found[name], grad) < CLOSE, name


class Rotating(nn.Module):
    """A layer of a state that every forward exchanges for another one after reading it."""

    state: Tensor

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = Layer(lambda m, h: m.base(h) + m.low(h))
        self.register_buffer("state", x_MK(192, K).detach())
        self.read = read

    def forward(self) -> Tensor:
        h = torch.tanh(self.read(self.state))
        y = torch.tanh(self.layer.body(self.layer, h))
        self.state.copy_(self.state.flip(0))
        return y


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda state: state,
    "a slice": lambda state: state[:96],
    "a chunk": lambda state: state.chunk(2)[1],
    "rows by index": lambda state: state[torch.arange(96)],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.usefixtures("graph_or_code")
def test_an_input_is_not_computed_again_from_what_forward_wrote_to(
    read: Callable[[Tensor], Tensor],
) -> None:
    """The gradient of A reads h, and the state that h comes from is another one by then."""
    expected, grads = step(module := Rotating(read), module=module)
    result = compile_step(Rotating(read))
    assert testing.relative_error(result.output, expected) < CLOSE
    assert result.gradients.keys() == grads.keys() >= {"layer.a", "layer.b"}
    for name, grad in grads.items():
        assert testing.relative_error(result.gradients[name], grad) < CLOSE, name
    assert result.reasons["extend_k"] == {WRITTEN: 1}


class Doubled(nn.Module):
    """A projection of twice a state, which is then cleared."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(lambda m, h: m.base(h) * 0.1 + (self.state * 2) @ m.a.t() @ m.b.t())
        generator = torch.Generator().manual_seed(5)
        self.register_buffer("state", torch.randn(96, K, generator=generator).to(BF16))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.state.mul_(0.0)
        return y


@pytest.mark.usefixtures("graph_or_code")
def test_a_factor_is_not_moved_off_what_forward_wrote_to() -> None:
    """The gradient of A reads the product with the factor, not the state, which is zero by then."""
    x = x_MK(96, K)
    expected, grads = step(module := Doubled(), x, module=module)
    result = compile_step(module := Doubled(), x_MK(96, K), module=module)
    assert testing.relative_error(result.output, expected) < CLOSE
    for name, grad in grads.items():
        assert testing.relative_error(result.gradients[name], grad) < CLOSE, name
    assert FORWARD_WRITES in result.reasons["fold_lora"]


@pytest.mark.usefixtures("graph_or_code")
def test_a_nested_compile_region_leaves_its_input_alone() -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer(lambda m, h: m.base(h) + m.low(h), n=K)

        def forward(self, x: Tensor) -> Tensor:
            def layer(x: Tensor) -> Tensor:
                y: Tensor = self.layer(x)
                return y

            region: Any = torch.compiler.nested_compile_region(layer)
            y: Tensor = region(region(x))
            return y

    x = x_MK(96, K)
    before = x.detach().clone()
    skip_unless_regions_chain(Region(), x)
    result = same_as_eager(Region(), x)
    assert torch.equal(x, before)
    assert result.applied["canonicalize"] == 3 and result.applied["extend_k"] == 2


# --- layers and biases --------------------------------------------------------------------------


@pytest.mark.usefixtures("graph_or_code")
def test_a_layer_right_after_another() -> None:
    result = same_as_eager(nn.Sequential(linear(K), linear(K)))
    assert result.applied["canonicalize"] == 4


@pytest.mark.usefixtures("graph_or_code")
@pytest.mark.parametrize("columns", [N, 1])
def test_a_bias_with_rows_stays_below_the_view(columns: int) -> None:
    def body(m: Layer, h: Tensor) -> Tensor:
        weight = bnb.functional.dequantize_4bit(m.base.weight, m.base.weight.quant_state)
        rows = h.flatten(0, 1)
        return torch.addmm(twice(rows)[:, :columns], rows, weight.t()).view(96, 1, N)

    same_as_eager(Layer(body))


# --- factors, clones and casts ------------------------------------------------------------------

CHAINS: dict[str, Callable[[Layer, Tensor], Tensor]] = {
    "two factors": lambda m, h: m.base(h) + (h @ m.a.t() * 2.0 * 3.0) @ m.b.t(),
    "a factor before and after": lambda m, h: (
        m.base(h) + (((h[:, :8] * 2.0) @ m.a.t()) * 3.0).repeat(1, 6, 1) @ m.b.t()
    ),
    "a clone under a factor": lambda m, h: m.base(h) + ((h @ m.a.t()).clone() * 2.0) @ m.b.t(),
    "a clone under casts": lambda m, h: m.base(h).clone().float().to(BF16),
    "casts twice": lambda m, h: m.base(h).float().to(BF16).float().to(BF16),
    "a factor of both operands": lambda m, h: (
        m.base(h) + torch.mm(s := torch.tanh(m.a[:, :R]) * 0.5, s).sum()
    ),
    "a factor of integers": lambda m, h: (
        m.base(h) + torch.mm((m.a > 0).long().t() * 0.5, torch.tanh(m.a).float()).sum().to(BF16)
    ),
}


@pytest.mark.usefixtures("graph_or_code")
@pytest.mark.parametrize("name", CHAINS)
def test_chains_that_an_earlier_edit_changes(name: str) -> None:
    same_as_eager(Layer(CHAINS[name]))


@pytest.mark.usefixtures("graph_or_code")
@pytest.mark.parametrize("numerics", ["default", "relaxed"])
def test_a_router_in_float32_is_no_adapter(numerics: str) -> None:
    """Nor is it a site that strict could complain of."""

    def body(m: Layer, h: Tensor) -> Tensor:
        weights = (h.float() @ m.a.t()).softmax(-1)
        return m.base(h) * weights[..., :1].to(BF16)  # type: ignore[no-any-return]

    options = {"qfuse.numerics": numerics, "qfuse.strict": True}
    result = same_as_eager(Layer(body, adapter_dtype=FP32), options=options)
    assert "fold_lora" not in result.applied and "fold_lora" not in result.reasons


def test_what_is_returned_keeps_its_own_memory() -> None:
    layer = linear()

    def returned(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = layer(x)
        return y, y.clone(), x.float().to(BF16)

    torch._dynamo.reset()
    x = x_MK(4, K).detach()
    with torch.no_grad():
        y, copy, same = torch.compile(returned, backend=qfuse, options=SMALL)(x)
    assert len({t.data_ptr() for t in (x, y, copy, same)}) == 4
