"""Gradients of inputs under dropout that are added to products in place, and those that are not."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_leaves

from inductor_q import lowerings, testing
from inductor_q.backend import qfuse
from inductor_q.context import Context, new_report
from inductor_q.kernels import dropout_reference
from inductor_q.lowerings.calls import qfuse_add_dropout_grad_x
from inductor_q.ops import eight_bits
from inductor_q.ops.registry import define_ops
from inductor_q.passes.add_gradients import ADD_GRAD_X, ALONE, READ, WIDE, AddGradients
from inductor_q.passes.fuse_dropout import GRAD_X
from inductor_q.passes.graph import ADD, CAST
from inductor_q.passes.runner import run
from tests.passes.test_add_adapters import traced
from tests.passes.test_fuse_dropout import ALWAYS, Masked, note_seeds
from tests.support.allocated import most_beside
from tests.support.compiling import SMALL, compile_step, step
from tests.support.resolving import CPU, on_cpu
from tests.support.thresholds import ANY_PRODUCT

pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

define_ops()
BF16, FP32 = torch.bfloat16, torch.float32
#: Rows, as two sequences; in- and out-features; ranks of an adapter.
ROWS, INS, OUTS, RANK = 32, 64, 48, 4
P = 0.25


# --- graphs: what is taken, and why not -----------------------------------------------------------


def operands(dtype: torch.dtype = FP32) -> list[Tensor]:
    """dY, W, an adapter's A and the gradient of its projection, and seeds."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, OUTS), (OUTS, INS), (RANK, INS), (ROWS, RANK))
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [*drawn, torch.arange(2)]


def dropped(*of_x: Any, index: int = 0) -> Any:
    a, low, seeds = of_x
    return GRAD_X(a, seeds, index, low, 1, P)


def rows(matrix: Tensor) -> Tensor:
    return matrix.view(2, ROWS // 2, -1)


def of_a_layer(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    return rows(dropped(*of_x)) + rows(dy @ w)


def other_way_round(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    return rows(dy @ w) + rows(dropped(*of_x))


def matrices(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    return dy @ w + dropped(*of_x)


def beside_others(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    """The sum has two more terms, which stand between the two."""
    return rows(dropped(*of_x)).add(rows(dy @ dy.t() @ dropped(*of_x))) + (w.sum() + rows(dy @ w))


def of_two_layers(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    """The last product is taken, before which all others are."""
    return rows(dy @ w) + rows(dropped(*of_x)) + rows(dy.cos() @ w)


def of_two_adapters(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    return rows(dropped(*of_x)) + (rows(dropped(*of_x, index=1)) + rows(dy @ w))


def of_adapters_alone(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    return rows(dropped(*of_x)) + rows(dropped(*of_x, index=1))


def in_float32(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    dy, w, a, low = (t.bfloat16() for t in (dy, w, *of_x[:2]))
    return CAST(rows(dy @ w), FP32) + CAST(rows(dropped(a, low, *of_x[2:])), FP32)


def widened_behind(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    """The sum is in 16 bits; what it is added to is not."""
    half = [t.bfloat16() for t in (dy, w, *of_x[:2])]
    return dy.sum() + CAST(of_a_layer(*half, *of_x[2:]), FP32) + rows(dy @ w).cos()


def of_no_product(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    return (dy @ w).cos() + dropped(*of_x)


def of_an_input(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    """What a caller holds is not written to."""
    return w[:ROWS] + dropped(*of_x)


def by_itself(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    return dropped(*of_x).cos() * (dy @ w)


def twice(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    term = dropped(*of_x)
    return (term + term) * (dy @ w)


def scaled(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    return torch.add(dy @ w, dropped(*of_x), alpha=2)


def turned(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    """The product is as large, but its rows are columns of the sum."""
    square = (w @ w.t()).view(OUTS, OUTS)
    a, low, seeds = of_x
    return square.t() + GRAD_X(a[:, :OUTS], seeds, 0, low.repeat(2, 1)[:OUTS], 1, P)


def every_pair(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    return (dy @ w).view(ROWS, 1, INS) + dropped(*of_x).view(1, ROWS, INS)


def gradient_read(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    term = dropped(*of_x)
    return (dy @ w + term) * term


def product_read(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    product = dy @ w
    return (rows(product) + rows(dropped(*of_x))) * product.sum()


def view_read(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    product = rows(dy @ w)
    return (product + rows(dropped(*of_x))) * product


def returned(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    product = dy @ w
    return product + dropped(*of_x), product


@pytest.mark.parametrize("fn, reasons", [
    (of_a_layer, [""]),
    (other_way_round, [""]),
    (matrices, [""]),
    (beside_others, ["", ALONE]),
    (of_two_layers, [""]),
    (of_two_adapters, ["", ""]),
    (widened_behind, [""]),
    (of_adapters_alone, [ALONE, ALONE]),
    (of_no_product, [ALONE]),
    (of_an_input, [ALONE]),
    (by_itself, [ALONE]),
    (twice, [ALONE]),
    (scaled, [ALONE]),
    (turned, [ALONE]),
    (every_pair, [ALONE]),
    (gradient_read, [ALONE]),
    (product_read, [READ]),
    (view_read, [READ]),
    (returned, [READ]),
    (in_float32, [WIDE]),
])  # fmt: skip
def test_what_is_added_in_place(fn: Any, reasons: list[str]) -> None:
    """Where it is, nothing but the sum reads the product, and values are what they were."""
    args = operands()
    graph = traced(fn, *args)
    (term,) = graph.find_nodes(op="call_function", target=GRAD_X)[:1]
    context = Context(on_cpu(), new_report(on_cpu(), CPU))
    with V.set_fake_mode(term.meta["val"].fake_mode):
        run(AddGradients(), graph, context)
    assert [site.rejected for site in context.report.sites] == reasons
    assert all(site.by_choice for site in context.report.sites)
    found = graph.find_nodes(op="call_function", target=ADD_GRAD_X)
    assert len(found) == reasons.count("")
    for node in found:
        assert [*node.args[0].users] == [node]
    expected, before = fn(*args), [arg.clone() for arg in args]
    tolerance: Any = {"rtol": 2**-7, "atol": 2**-4} if fn is widened_behind else {}
    torch.testing.assert_close(fx.GraphModule(nn.Module(), graph)(*args), expected, **tolerance)
    assert all(map(torch.equal, args, before))


def test_the_last_of_several_products_is_taken() -> None:
    graph = traced(of_two_layers, *operands())
    products = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    with V.set_fake_mode(products[0].meta["val"].fake_mode):
        run(AddGradients(), graph, Context(on_cpu(), new_report(on_cpu(), CPU)))
    (total,) = graph.find_nodes(op="call_function", target=ADD_GRAD_X)
    assert total.args[0] is products[-1]
    assert len(graph.find_nodes(op="call_function", target=ADD)) == 1


# --- generated code: where the op takes the product's memory --------------------------------------


def alone(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    a, low, seeds = of_x
    return ADD_GRAD_X(dy @ w, a, seeds, 0, low, 1, P).relu()


def two_in_a_row(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    a, low, seeds = of_x
    total = ADD_GRAD_X(dy @ w, a, seeds, 0, low, 1, P)
    return ADD_GRAD_X(total, a, seeds, 1, low, 1, P).relu()


def behind_a_product_that_is_added(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    a, low, seeds = of_x
    total = torch.ops.qfuse.add_product(dy @ w, low, a)
    return ADD_GRAD_X(total, a, seeds, 1, low, 1, P).relu()


def written_twice(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    """Two sums that begin with a product of the same factors: each has its own."""
    a, low, seeds = of_x
    one = ADD_GRAD_X(dy @ w, a, seeds, 0, low, 1, P)
    return one * ADD_GRAD_X(dy @ w, a, seeds, 1, low, 1, P)


def read_beside(dy: Tensor, w: Tensor, *of_x: Tensor) -> tuple[Tensor, Tensor]:
    base, (a, low, seeds) = dy @ w, of_x
    total: Any = ADD_GRAD_X(base, a, seeds, 0, low, 1, P)
    return total.relu(), base.relu()


def handed_out(dy: Tensor, w: Tensor, *of_x: Tensor) -> tuple[Tensor, Tensor]:
    base, (a, low, seeds) = dy @ w, of_x
    total: Any = ADD_GRAD_X(base, a, seeds, 0, low, 1, P)
    return total, base


def to_an_input(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    a, low, seeds = of_x
    return ADD_GRAD_X(w[:ROWS], a, seeds, 0, low, 1, P)


def to_a_sum_with_an_input(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    """The first is a tensor of its own, which the second may write to."""
    a, low, seeds = of_x
    return ADD_GRAD_X(to_an_input(dy, w, *of_x), a, seeds, 1, low, 1, P)


def to_its_own_factor(dy: Tensor, w: Tensor, *of_x: Tensor) -> Any:
    """The product is what the gradient is computed from, too."""
    base, seeds = w.t() @ w, of_x[-1]
    return ADD_GRAD_X(base, base, seeds, 0, w.t() @ w.cos(), 1, P)


@pytest.mark.parametrize("fn, calls", [
    (alone, 1),
    (two_in_a_row, 2),
    (behind_a_product_that_is_added, 1),
    (written_twice, 2),
    (read_beside, 0),
    (handed_out, 0),
    (to_an_input, 0),
    (to_a_sum_with_an_input, 1),
    (to_its_own_factor, 0),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
def test_in_place(fn: Any, calls: int, dtype: torch.dtype, dynamic: bool, device: str) -> None:
    """The op is where nothing else reads the product; elsewhere it writes what it adds to memory of
    its own, as before."""
    lowerings.register()
    args = [arg.to(device) for arg in operands(dtype)]
    before, expected = [arg.clone() for arg in args], fn(*args)
    with config.patch(fx_graph_cache=False):
        compiled = torch.compile(fn, dynamic=dynamic, fullgraph=True)
        actual, (code,) = run_and_get_code(compiled, *args)
    for mine, right in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        assert testing.relative_error(mine, right) <= (1e-6 if dtype is FP32 else 2**-8)
    assert code.count("add_dropout_grad_x_.default(") == calls
    assert all(map(torch.equal, args, before))


def test_cpp_wrapper_code_adds_out_of_place() -> None:
    lowerings.register()
    args = operands()
    options: Any = {"cpp_wrapper": True, "fx_graph_cache": False}
    actual, (code,) = run_and_get_code(torch.compile(alone, options=options), *args)
    torch.testing.assert_close(actual, alone(*args))
    assert "qfuse::dropout_grad_x" in code and "qfuse::add_dropout_grad_x_" not in code


# --- a gated MLP, as a Trainer runs it ------------------------------------------------------------

INNER = 256


class Gated(nn.Module):
    """gate, up and down, packed, with biases that train; adapters in float32 under dropout."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        sizes = {"gate": (INNER, INS), "up": (INNER, INS), "down": (INS, INNER)}
        for name, (outs, ins) in sizes.items():
            weight = torch.randn(outs, ins, generator=generator) * ins**-0.5
            bias = torch.randn(outs, generator=generator)
            setattr(self, name, testing.quantized_linear(weight.to(BF16), bias.to(BF16)))
        settings: Any = {"r": RANK, "lora_dropout": P, "target_modules": [*sizes], "bias": "all"}
        peft.inject_adapter_in_model(peft.LoraConfig(**settings), self)
        for name, parameter in self.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) / 8

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x)
        gate, up, down = (self.get_submodule(name) for name in ("gate", "up", "down"))
        return torch.tanh(down(nn.functional.silu(gate(h)) * up(h)))


def batch(length: int = 64) -> Tensor:
    x = torch.randn(2, length, INS, generator=torch.Generator().manual_seed(3))
    return x.to(BF16).requires_grad_()


def autocast(model: Any) -> Any:
    def forward(x: Tensor) -> Any:
        with torch.autocast("cpu", BF16):
            return model(x)

    return forward


def options(compute: str, off: Sequence[str] = ()) -> dict[str, Any]:
    passes = ",".join(f"-{name}" for name in ("widen_products", *off))
    thresholds = {**ALWAYS, **ANY_PRODUCT}
    return {"qfuse.compute": compute, "qfuse.thresholds": thresholds, "qfuse.passes": passes}


def with_masks(model: Any, seeds: Tensor) -> Any:
    """A copy with the masks that the ops define: of gate and up by one seed, of down by another."""
    other = copy.deepcopy(model)
    for name, place, adapter in (("gate", 0, 0), ("up", 0, 1), ("down", 1, 0)):
        other.get_submodule(name).lora_dropout["default"] = Masked(seeds[place], adapter)
    return other


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    return note_seeds(monkeypatch)


def test_gradients_of_a_trainers_step(seeds: list[Tensor]) -> None:
    """Errors of the gradients of x, A, B and biases are at most 1.25 times eager mode's."""
    model, x = Gated().train(), batch()
    run = functools.partial(compile_step, autocast(model), x, module=model, options=options("bf16"))
    result, codes = run_and_get_code(run)
    assert result.applied["add_gradients"] == 2
    assert [code.count(f"{qfuse_add_dropout_grad_x.__name__}(") for code in codes] == [0, 2]
    reference = with_masks(model, seeds[-1])
    eager, own = step(autocast(reference), x, module=reference)
    exact_model = testing.reference_model(reference)
    for name, parameter in exact_model.named_parameters():
        parameter.requires_grad_(name in own)
    exact, right = step(exact_model, x.detach().double().requires_grad_(), module=exact_model)
    assert result.gradients.keys() == right.keys() and len(right) == 1 + 3 * 3
    for name, mine in {"output": result.output, **result.gradients}.items():
        written, true = (eager, exact) if name == "output" else (own[name], right[name])
        allowed = 1.25 * testing.relative_error(written, true)
        assert testing.relative_error(mine, true) <= allowed, name


def test_gradients_in_fp8(seeds: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the product that a GPU has. They are as exact as with a sum of two tensors."""

    def scaled_product(a: Tensor, b: Tensor, *scales: Any, dtype: torch.dtype) -> Tensor:
        scale_a, scale_b = scales
        scale_a = torch.ops.qfuse.materialize(scale_a)  # a CPU looks at strides that mean nothing
        if scale_b is None:
            scale_b = torch.ones((1, b.shape[1]), dtype=FP32)
        return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype)

    monkeypatch.setattr(eight_bits, "scaled_product", scaled_product)
    model, x = Gated().train(), batch()
    errors: list[dict[str, float]] = []
    for off in ((), ("add_gradients",)):
        torch.manual_seed(0)
        given = options("fp8", off)
        run = functools.partial(compile_step, autocast(model), x, module=model, options=given)
        result, codes = run_and_get_code(run)
        calls = codes[-1].count(f"{qfuse_add_dropout_grad_x.__name__}(")
        assert calls == result.applied.get("add_gradients", 0) == (0 if off else 2)
        exact = testing.reference_model(with_masks(model, seeds[-1]))
        _, right = step(exact, x.detach().double().requires_grad_(), module=exact)
        grads = result.gradients
        errors.append({n: testing.relative_error(grads[n], true) for n, true in right.items()})
    assert torch.equal(seeds[0], seeds[-1])
    for name, mine in errors[0].items():
        assert mine <= 1.05 * errors[1][name] and mine < 0.1, name


def test_peak_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It falls by the gradient of down's input. The ops' kernels need little memory besides their
    results, which is more than can be said of the references: so nothing is computed here."""
    for kind in (dropout_reference.GradA, dropout_reference.GradX):
        monkeypatch.setattr(kind, "run", lambda self, call: call.new())
    monkeypatch.setattr(dropout_reference.Project, "run", lambda self, call: call.out)
    model, x = Gated().train(), batch(length=512)
    inputs = [x, *testing.adapter_parameters(model)]
    peaks = []
    for off in ((), ("add_gradients",)):
        torch._dynamo.reset()
        given = {**SMALL, **options("bf16", off)}
        compiled = autocast(torch.compile(model, backend=qfuse, options=given))
        run = lambda: torch.autograd.grad(compiled(x).sum(), inputs)  # noqa: B023, E731
        peaks.append(most_beside(run))
    size = x.nbytes // INS * INNER
    assert peaks[1] - peaks[0] == pytest.approx(size, rel=0.05)
