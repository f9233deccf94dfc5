"""`qfuse::linear` and `qfuse::lora_linear` against bitsandbytes' and PEFT's formula and float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from inductor_q import ops, testing
from inductor_q.backend import qfuse
from inductor_q.exc import WrongShape
from inductor_q.formats import FORMATS
from inductor_q.kernels.dispatch import preferring
from inductor_q.kernels.provider import REFERENCE
from tests.support.compiling import SMALL, Between, step
from tests.support.op_layers import by_hand, error, exact, gradients, layer
from tests.support.quantized import DTYPES, assert_same_bits, by_table, needs_0_50

BACKENDS = [pytest.param("inductor", id="inductor"), pytest.param(qfuse, id="qfuse")]


pytestmark = pytest.mark.usefixtures("fresh_compiler")


#: The sum of a dot product of k terms may be off by k roundings; where eager is exact, so are we.
SLACK = {torch.float32: 1e-7, torch.bfloat16: 1e-4, torch.float16: 1e-5}


@pytest.mark.parametrize(
    ("dtype", "adapter"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("ranks", [(8,), (8, 4, 2)], ids=str)
def test_error_against_float64_is_that_of_eager(
    ranks: tuple[int, ...], dtype: torch.dtype, adapter: torch.dtype
) -> None:
    case = layer((4, 16), n=96, k=128, ranks=ranks, dtype=dtype, adapter=adapter)
    y, expected_gradients = exact(case)
    ours, theirs = case(), by_hand(case)
    assert (ours.dtype, ours.shape) == (dtype, (4, 16, 96))
    assert error(ours, y) <= 1.25 * error(theirs, y) + SLACK[dtype]
    for mine, other, grad, of in zip(
        gradients(ours, case.leaves),
        gradients(theirs, case.leaves),
        expected_gradients,
        case.leaves,
        strict=True,
    ):
        assert (mine.dtype, mine.shape) == (of.dtype, of.shape)
        assert error(mine, grad) <= 1.25 * error(other, grad) + SLACK[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_is_torch_linear_on_the_values(dtype: torch.dtype) -> None:
    case = layer((2, 3), dtype=dtype, ranks=())
    weight = by_table(case.w.packed, case.w.state)
    for bias in (None, case.bias):
        with preferring("linear_rows", REFERENCE):  # a kernel of few rows sums in another order
            found = ops.linear(case.x, *case.w.operands, bias=bias).detach()
        assert_same_bits(found, F.linear(case.x, weight, bias).detach())
    ours = ops.linear(case.x, *case.w.operands, bias=case.bias)
    y, expected = exact(case)
    theirs = gradients(by_hand(case), case.leaves)
    for mine, other, grad in zip(gradients(ours, case.leaves), theirs, expected, strict=True):
        assert error(mine, grad) <= 1.25 * error(other, grad) + SLACK[dtype]
    assert error(ours, y) <= 1.25 * error(by_hand(case), y) + SLACK[dtype]


@pytest.mark.parametrize("lead", [(), (1,), (0,), (2, 0, 3), (1, 1, 1), (7,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_rows(dtype: torch.dtype, lead: tuple[int, ...]) -> None:
    """A vector, no row at all, one row: values, and gradients of the right shape."""
    case = layer(lead, dtype=dtype)
    ours, theirs = case(), by_hand(case)
    assert ours.shape == (*lead, 48)
    assert ours.is_contiguous()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2

    def assert_close(actual: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)

    assert_close(ours, theirs)
    for mine, other in zip(
        gradients(ours, case.leaves), gradients(theirs, case.leaves), strict=True
    ):
        assert_close(mine, other)
    plain = ops.linear(case.x, *case.w.operands, bias=case.bias)
    assert plain.shape == (*lead, 48)
    for mine, of in zip(gradients(plain, [case.x]), [case.x], strict=True):
        assert (mine.shape, mine.dtype) == (of.shape, dtype)


@needs_0_50
@settings(max_examples=40)
@given(
    lead=st.lists(st.integers(0, 4), max_size=3),
    n=st.integers(1, 40),
    k=st.integers(1, 70),
    ranks=st.lists(st.integers(1, 5), max_size=3),
)
def test_any_shape(lead: list[int], n: int, k: int, ranks: list[int]) -> None:
    case = layer(lead, n=n, k=k, ranks=ranks)
    ours, theirs = case(), by_hand(case)
    torch.testing.assert_close(ours, theirs)
    for mine, other in zip(
        gradients(ours, case.leaves), gradients(theirs, case.leaves), strict=True
    ):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(
    "batched", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["rows", "batches too"]
)
def test_compiled_once_for_any_number_of_rows(batched: bool) -> None:
    """bitsandbytes' layer under PEFT's adapter: forward and gradients as near to float64 as bf16
    is, in one graph for all lengths but 0 and 1, which torch specializes."""
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    module = Between(testing.lora_linear(128, 64, adapter_dtype=torch.bfloat16))
    exact = testing.reference_model(module)
    compiled = torch.compile(module, backend=qfuse, options=SMALL, dynamic=True, fullgraph=True)
    kinds = set()
    rows = st.tuples(st.integers(0, 300))
    batches = st.tuples(st.integers(2, 4), st.integers(2, 300))

    @settings(max_examples=40)
    @given(lead=rows | batches if batched else rows)
    @example(lead=(5,))
    @example(lead=(0,))
    @example(lead=(1,))
    @example(lead=(3, 7) if batched else (7,))  # equal at first, two lengths would be taken for one
    def close_to_float64(lead: tuple[int, ...]) -> None:
        kinds.add(tuple(min(length, 2) for length in lead))
        generator = torch.Generator().manual_seed(sum(lead))
        x = torch.randn(*lead, 64, generator=generator).bfloat16().requires_grad_()
        y, grads = step(compiled, x, module=module)
        true_y, true = step(exact, x.detach().double().requires_grad_(), module=exact)
        assert y.shape == (*lead, 128)
        assert grads.keys() == true.keys() and len(true) == 3
        # One wrong row of 300 would be 6 %.
        limit = 2 * torch.finfo(torch.bfloat16).eps
        assert testing.relative_error(y, true_y) <= limit
        for name, grad in true.items():
            assert grads[name].shape == grad.shape
            assert testing.relative_error(grads[name], grad) <= limit, name

    with testing.CompileTrace() as trace:
        close_to_float64()
    assert kinds == {(0,), (1,), (2,)} | ({(2, 2)} if batched else set())
    assert trace.graphs == len(kinds)
    assert trace.breaks == []


@pytest.mark.parametrize("view", ["columns", "rows", "transposed", "expanded"])
def test_strided_input(view: str) -> None:
    case = layer((6,))
    wide = torch.randn(12, 128)
    views = {
        "columns": wide[:6, ::2],
        "rows": wide[::2, :64],
        "transposed": torch.randn(64, 6).t(),
        "expanded": wide[:1, :64].expand(6, 64),
    }
    case.x = views[view].requires_grad_()
    ours, theirs = case(), by_hand(case)
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, theirs)
    for mine, other in zip(
        gradients(ours, case.leaves), gradients(theirs, case.leaves), strict=True
    ):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("rows", [2, 65])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 64)])
def test_a_bias_of_another_shape_is_refused(shape: tuple[int, ...], rows: int) -> None:
    """A kernel would read beyond its end."""
    fmt = "nf4_b64"
    operands = FORMATS[fmt].sample((64, 64), torch.Generator().manual_seed(0))
    x = torch.ones(rows, 64)
    with pytest.raises(WrongShape, match=re.escape(f"bias has shape {shape}, expected (64,)")):
        ops.linear(x, operands, fmt, (64, 64), torch.ones(shape))
    with FakeTensorMode() as mode, pytest.raises(WrongShape, match="bias"):
        fake, bias, *packed = (mode.from_tensor(t) for t in (x, torch.ones(shape), *operands))
        torch.ops.qfuse.linear(fake, packed, fmt, (64, 64), bias)


def test_strided_gradient() -> None:
    """A gradient that arrives transposed or expanded."""
    case = layer((6,))
    reductions: list[Callable[[Tensor], Tensor]] = [
        lambda y: y.t()[:, ::2].square().sum(),
        lambda y: y.sum(),
    ]
    for reduce in reductions:
        mine = torch.autograd.grad(reduce(case()), case.leaves)
        other = torch.autograd.grad(reduce(by_hand(case)), case.leaves)
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_no_gradient_asked_for() -> None:
    case = layer()
    for leaf in case.leaves:
        leaf.requires_grad_(False)
    assert not case().requires_grad
    assert case.bias is not None
    case.bias.requires_grad_()
    (grad,) = torch.autograd.grad(case().sum(), case.bias)
    torch.testing.assert_close(grad, torch.full((48,), 5.0))
    case.b[0].requires_grad_()
    mine = torch.autograd.grad(case().sum(), case.b[0])
    torch.testing.assert_close(mine, torch.autograd.grad(by_hand(case).sum(), case.b[0]))


def test_gradcheck_of_extend_in_float64() -> None:
    """The one op with float64: a quantized weight has no values in it, by its documentation."""

    def double(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    x, z, p, q = double(2, 3, 5), double(2, 3, 2), double(5, 4), double(2, 1)

    def f(x: Tensor, z: Tensor, p: Tensor, q: Tensor) -> Tensor:
        return ops.extend([x, z], [x, z], [p, q])

    assert torch.autograd.gradcheck(f, (x, z, p, q))
    expected = torch.cat([x, z, x @ p, z @ q], -1)
    torch.testing.assert_close(f(x, z, p, q), expected)
    assert f(x, z, p, q).is_contiguous()


@pytest.mark.parametrize("op", ["linear", "lora_linear"])
def test_saved_for_backward_is_packed(op: str) -> None:
    """No tensor of the weight's shape, nor any other but x, the adapters and packed bytes."""
    case = layer((3,), n=256, k=128, dtype=torch.bfloat16)
    operands, name, shape = case.w.operands
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if op == "linear":
            ops.linear(case.x, operands, name, shape, bias=case.bias).sum().backward()
        else:
            case().sum().backward()
    allowed = [*operands, *([case.x, *case.a, *case.b] if op == "lora_linear" else [])]
    pointers = {tensor.data_ptr() for tensor in allowed}
    assert {tensor.data_ptr() for tensor in saved} == pointers
    assert all(tensor.numel() < 256 * 128 for tensor in saved)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", ["linear", "lora_linear"])
def test_compiled_layer(op: str, backend: Any) -> None:
    """Forward and backward under both backends, at two numbers of rows without a recompile."""
    case = layer((6,), ranks=(4, 2))
    weight = case.w.operands

    def f(x: Tensor, a: list[Tensor], b: list[Tensor], bias: Tensor | None) -> Tensor:
        if op == "linear":
            return ops.linear(x, *weight, bias=bias)
        return ops.lora_linear(x, *weight, a, b, case.scaling, bias=bias)

    compiled = torch.compile(f, backend=backend, fullgraph=True, dynamic=True)
    counters.clear()
    for rows in (6, 9):
        case = layer((rows,), ranks=(4, 2))
        if op == "linear":
            case.a, case.b, case.scaling = [], [], []
        ours, theirs = compiled(case.x, case.a, case.b, case.bias), by_hand(case)
        torch.testing.assert_close(ours, theirs)
        for mine, other in zip(
            gradients(ours, case.leaves), gradients(theirs, case.leaves), strict=True
        ):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


# --- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_error_against_float64_is_that_of_eager(dtype: torch.dtype) -> None:
    case = layer((4, 64), n=256, k=512, ranks=(16,), dtype=dtype, device="cuda")
    weight = by_table(case.w.packed, case.w.state).double()
    ours, theirs = case(), by_hand(case)
    a, b, s = case.a[0].double(), case.b[0].double(), case.scaling[0]
    assert case.bias is not None
    x = case.x.double()
    y = x @ weight.t() + case.bias.double() + (x @ a.t()) @ b.t() * s
    assert error(ours, y) <= 1.25 * error(theirs, y) + SLACK[dtype]
    for mine, other in zip(
        gradients(ours, case.leaves), gradients(theirs, case.leaves), strict=True
    ):
        assert error(mine, other.double()) <= 10 * SLACK[dtype] + 2e-2 * (dtype != torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_gpu_compiled_layer_in_a_graph(backend: Any) -> None:
    """Inference of a compiled layer, captured and replayed with another input."""
    case = layer((8,), n=256, k=512, dtype=torch.bfloat16, device="cuda")
    for leaf in case.leaves:
        leaf.requires_grad_(False)
    f = torch.compile(lambda x: ops.linear(x, *case.w.operands), backend=backend, fullgraph=True)
    x = case.x.clone()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        f(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = f(x)
    x.copy_(case.x * 3)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(y, ops.linear(case.x * 3, *case.w.operands))
