"""The `qfuse::` ops: schema, semantics, gradients, and one op node where torch traces."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import inductor_q
from inductor_q import exc, ops
from inductor_q.backend import qfuse
from tests.quantized import (
    DTYPES,
    QUANT_TYPES,
    Quantized,
    assert_same_as_native,
    assert_same_bits,
    by_table,
    needs_0_50,
    quantize,
)

QFUSE = torch.ops.qfuse
BACKENDS = [pytest.param("inductor", id="inductor"), pytest.param(qfuse, id="qfuse")]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


@dataclass
class Layer:
    """A quantized linear layer with adapters, as arguments of `ops.lora_linear`."""

    w: Quantized
    x: Tensor
    a: list[Tensor]
    b: list[Tensor]
    scaling: list[float]
    bias: Tensor | None

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, *self.a, *self.b, *([] if self.bias is None else [self.bias])]

    def __call__(self) -> Tensor:
        return ops.lora_linear(
            self.x, *self.w.operands, self.a, self.b, self.scaling, bias=self.bias
        )


def layer(
    lead: Sequence[int] = (5,),
    *,
    n: int = 48,
    k: int = 64,
    ranks: Sequence[int] = (4,),
    dtype: torch.dtype = torch.float32,
    adapter: torch.dtype | None = None,
    bias: bool = True,
    seed: int = 0,
    device: str = "cpu",
) -> Layer:
    """Seeded; B is not zero, so every gradient is alive."""
    generator = torch.Generator().manual_seed(seed)

    def leaf(shape: Sequence[int], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        value = torch.randn(tuple(shape), generator=generator, dtype=torch.float64) * scale
        return value.to(device, dtype).requires_grad_()

    adapter = adapter or dtype
    return Layer(
        w=quantize((n, k), dtype=dtype, seed=seed, device=device),
        x=leaf((*lead, k), dtype),
        a=[leaf((r, k), adapter, k**-0.5) for r in ranks],
        b=[leaf((n, r), adapter, 0.1) for r in ranks],
        scaling=[0.5 + i for i in range(len(ranks))],
        bias=leaf((n,), dtype) if bias else None,
    )


def gradients(y: Tensor, leaves: Sequence[Tensor], seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device, y.dtype)
    return list(torch.autograd.grad(y, leaves, grad))


def op_names(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if "qfuse" in str(node.target)]


# --- the ops as torch sees them -----------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck_dequantize(dtype: torch.dtype, nested: bool) -> None:
    opcheck(QFUSE.dequantize.default, (*quantize((48, 64), nested=nested).operands, dtype))


def test_opcheck_dequantize_out() -> None:
    """For generated code only, after functionalization: which is what opcheck would test last."""
    opcheck(
        QFUSE.dequantize.out,
        (*quantize((48, 64)).operands, torch.bfloat16),
        {"out": torch.empty(48, 64, dtype=torch.bfloat16)},
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_opcheck_linear(needs_grad: bool, bias: bool) -> None:
    case = layer(bias=bias)
    case.x.requires_grad_(needs_grad)
    opcheck(QFUSE.linear.default, (case.x, *case.w.operands, case.bias))


@pytest.mark.parametrize("ranks", [(4,), (4, 2), ()], ids=str)
@pytest.mark.parametrize("frozen", ["nothing", "x", "first A"])
def test_opcheck_lora_linear(frozen: str, ranks: tuple[int, ...]) -> None:
    case = layer((2, 3), ranks=ranks)
    if frozen == "x":
        case.x.requires_grad_(False)
    if frozen == "first A" and ranks:
        case.a[0].requires_grad_(False)
    opcheck(
        QFUSE.lora_linear.default,
        (case.x, *case.w.operands, case.a, case.b, case.scaling, case.bias),
    )


def test_opcheck_lora_linear_in_other_dtypes() -> None:
    case = layer((2, 3), dtype=torch.bfloat16, adapter=torch.float32)
    opcheck(
        QFUSE.lora_linear.default,
        (case.x, *case.w.operands, case.a, case.b, case.scaling, case.bias),
    )


def test_opcheck_extend() -> None:
    x = torch.randn(2, 5, 16, requires_grad=True)
    other = torch.randn(2, 5, 8, requires_grad=True)
    p = torch.randn(16, 4, requires_grad=True)
    q = torch.randn(8, 3, requires_grad=True)
    opcheck(QFUSE.extend.default, ([x, other], [x, other], [p, q]))
    opcheck(QFUSE.extend.default, ([x.detach()], [x.detach()], [p.detach()]))


def test_defined_once() -> None:
    from inductor_q.ops.registry import define_ops

    define_ops()
    importlib.reload(ops)
    assert str(QFUSE.dequantize.default._schema) == (
        "qfuse::dequantize(Tensor[] operands, str format, SymInt[] shape, ScalarType dtype) "
        "-> Tensor"
    )


# --- no dispatch in eager, one node where traced ------------------------------------------------


class Dispatched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_eager_dispatches_no_op() -> None:
    w = quantize((48, 64))
    with Dispatched() as seen:
        inductor_q.dequantize(w.packed, w.state)
        ops.dequantize(*w.operands, torch.float32)
    assert "aten.empty.memory_format" in seen.names  # the mode does see what happens
    assert not [name for name in seen.names if "qfuse" in name]


def test_traced_it_is_one_node() -> None:
    w = quantize((48, 64))
    graphs: list[fx.Graph] = []

    def keep(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(gm.graph)
        return gm.forward

    compiled = torch.compile(
        lambda packed: inductor_q.dequantize(packed, w.state), backend=keep, fullgraph=True
    )
    assert_same_bits(compiled(w.packed), by_table(w.packed, w.state))
    assert [op_names(graph) for graph in graphs] == [["qfuse.dequantize"]]
    calls = [node for node in graphs[0].nodes if node.op.startswith("call")]
    assert len(calls) - len(op_names(graphs[0])) <= 1  # besides it at most a detach


@pytest.mark.parametrize("op", ["dequantize", "linear", "lora_linear"])
def test_make_fx_sees_one_node(op: str) -> None:
    """Without Dynamo there is no `is_compiling`, and still the graph must hold the op."""
    case = layer()
    operands, name, shape = case.w.operands
    bodies: dict[str, Callable[[Tensor], Tensor]] = {
        "dequantize": lambda x: ops.dequantize(operands, name, shape, x.dtype),
        "linear": lambda x: ops.linear(x, operands, name, shape),
        "lora_linear": lambda x: ops.lora_linear(
            x, operands, name, shape, case.a, case.b, case.scaling
        ),
    }
    x = case.x.detach()
    with torch.no_grad():
        traced = make_fx(bodies[op])(x)
        assert op_names(traced.graph) == [f"qfuse.{op}.default"]
        assert_same_bits(traced(x), bodies[op](x))


# --- fakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_fake_has_the_shape_of_the_real(
    storage: torch.dtype, transposed: bool, nested: bool
) -> None:
    w = quantize((48, 64), nested=nested, storage=storage)
    packed = w.packed.t() if transposed else w.packed
    real = inductor_q.dequantize(packed, w.state)
    operands, name, shape = w.operands
    with FakeTensorMode() as mode:
        for tensor, attribute in ((w.state, "absmax"), (w.state.state2, "absmax")):
            if tensor is not None:
                setattr(tensor, attribute, mode.from_tensor(getattr(tensor, attribute)))
        if nested:
            w.state.offset = mode.from_tensor(w.state.offset)
            w.state.state2.code = mode.from_tensor(w.state.state2.code)
        fake = inductor_q.dequantize(mode.from_tensor(packed), w.state)
        out = ops.dequantize([mode.from_tensor(t) for t in operands], name, shape, torch.float16)
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())
    assert (out.shape, out.dtype) == (torch.Size(shape), torch.float16)


def test_meta_tensors() -> None:
    operands, name, shape = quantize((48, 64)).operands
    meta = [t.to("meta") for t in operands]
    out = QFUSE.dequantize(meta, name, shape, torch.bfloat16)
    assert (out.shape, out.device.type) == ((48, 64), "meta")
    y = ops.linear(torch.empty(2, 64, device="meta"), meta, name, shape)
    assert y.shape == (2, 48)


# --- dequantize ---------------------------------------------------------------------------------


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_transposed_gives_transposed_values(nested: bool, quant_type: str) -> None:
    w = quantize((48, 64), quant_type, nested=nested)
    actual = inductor_q.dequantize(w.packed.t(), w.state)
    assert actual.shape == (64, 48)
    assert_same_as_native(actual, w.packed.t(), w.state)
    assert_same_bits(actual, inductor_q.dequantize(w.packed, w.state).t())


def test_without_a_state_the_weight_is_returned() -> None:
    weight = torch.randn(3, 4)
    assert inductor_q.dequantize(weight, None) is weight
    assert inductor_q.dequantize(weight) is weight


def test_removed_arguments() -> None:
    w = quantize((48, 64))
    out = torch.empty(48, 64, dtype=torch.bfloat16)
    calls: list[Any] = [inductor_q.dequantize, ops.dequantize]
    for call in calls:
        with pytest.raises(TypeError, match="unexpected keyword argument 'out'"):
            call(w.packed, w.state, out=out)


def test_no_gradient_reaches_a_quantized_weight() -> None:
    w = quantize((48, 64), nested=False)
    operands, name, shape = w.operands
    operands[1].requires_grad_()
    values = QFUSE.dequantize(operands, name, shape, torch.float32)
    (grad,) = torch.autograd.grad(values.sum(), operands[1], allow_unused=True)
    assert grad is None


@needs_0_50
@pytest.mark.parametrize("provider", ["auto", "inductor", "cpp"])
def test_compiled_equals_eager_bitwise(provider: str) -> None:
    """As a kernel call and as Inductor's own loops: every dtype, storage and kind of scale."""
    weights = [
        quantize((6, 160), quant_type, nested=nested, storage=storage, blocksize=blocksize)
        for quant_type, nested, storage, blocksize in (
            ("nf4", True, torch.uint8, 64),
            ("nf4", False, torch.bfloat16, 32),
            ("fp4", True, torch.float32, 128),
            ("fp4", False, torch.uint8, 4096),
        )
    ] + [quantize((5, 7), "nf4")]

    def every(packed: list[Tensor]) -> list[Tensor]:
        return [
            inductor_q.dequantize(p, w.state, dtype=dtype)
            for p, w in zip(packed, weights, strict=True)
            for dtype in DTYPES
        ]

    compiled = torch.compile(
        every,
        backend=qfuse,
        fullgraph=True,
        options=cast(Any, {"qfuse.kernels": {"dequantize": provider}}),
    )
    packed = [w.packed for w in weights]
    expected = [by_table(w.packed, w.state, dtype) for w in weights for dtype in DTYPES]
    for actual, value in zip(compiled(packed), expected, strict=True):
        assert_same_bits(actual, value)


def test_stock_inductor_compiles_the_op() -> None:
    w = quantize((6, 160))

    def f(packed: Tensor, x: Tensor) -> Tensor:
        return x * 2 + inductor_q.dequantize(packed, w.state, dtype=torch.float32)

    x = torch.randn(6, 160)
    compiled = torch.compile(f, backend="inductor", fullgraph=True)
    assert_same_bits(compiled(w.packed, x), f(w.packed, x))


def test_storages_do_not_exhaust_the_recompile_limit() -> None:
    """Byte and Float storage in turn: one graph each, whatever the number of steps."""
    counters.clear()
    weights = [quantize((48, 64), storage=s, seed=i) for i, s in enumerate((torch.uint8, *DTYPES))]

    @torch.compile(backend="eager", fullgraph=True)
    def step(packed: Tensor, x: Tensor, operands: list[Tensor]) -> Tensor:
        return ops.linear(x, [packed, *operands], "nf4_b64_nested", [48, 64]).relu()

    x = torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=True)
    for _, w in itertools.product(range(3), weights):
        step(w.packed, x, w.operands[0][1:]).sum().backward()
    assert counters["stats"]["unique_graphs"] == len(weights)
    assert not counters["graph_break"]
    assert not counters["unimplemented"]


# --- linear and lora_linear ---------------------------------------------------------------------


def by_hand(case: Layer) -> Tensor:
    """bitsandbytes' layer and PEFT's `Linear4bit.forward`: the formula of eager mode."""
    weight = by_table(case.w.packed, case.w.state).to(case.x.dtype)
    result = F.linear(case.x, weight, case.bias)
    for a, b, s in zip(case.a, case.b, case.scaling, strict=True):
        result = result + (F.linear(F.linear(case.x.to(a.dtype), a), b) * s).to(result.dtype)
    return result


def exact(case: Layer) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients in float64."""

    def double(x: Tensor) -> Tensor:
        return x.detach().double().requires_grad_()

    weight = by_table(case.w.packed, case.w.state).double()
    x, a, b = double(case.x), [double(t) for t in case.a], [double(t) for t in case.b]
    bias = None if case.bias is None else double(case.bias)
    y = F.linear(x, weight, bias)
    for a_i, b_i, s in zip(a, b, case.scaling, strict=True):
        y = y + (x @ a_i.t()) @ b_i.t() * s
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(case.x.dtype)
    leaves = [x, *a, *b, *([] if bias is None else [bias])]
    return y, list(torch.autograd.grad(y, leaves, grad.double()))


def error(actual: Tensor, expected: Tensor) -> float:
    return float(((actual.double() - expected).norm() / expected.norm()).detach())


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
        assert_same_bits(
            ops.linear(case.x, *case.w.operands, bias=bias).detach(),
            F.linear(case.x, weight, bias).detach(),
        )
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


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_state_under_dynamic_shapes(nested: bool) -> None:
    """Dynamo makes numbers of the state symbolic then, the blocksize too."""
    weights = [quantize((6, 256), blocksize=blocksize, nested=nested) for blocksize in (64, 128)]

    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def f(packed: Tensor, state: Any) -> Tensor:
        return inductor_q.dequantize(packed, state)

    for w in weights:
        assert_same_bits(f(w.packed, w.state), by_table(w.packed, w.state))


# --- errors -------------------------------------------------------------------------------------

REMEDY = "The state belongs to another weight, blocksize or format: quantize the weight again."
FLOATS = "(torch.float32, torch.bfloat16, torch.float16)"


def plain() -> tuple[list[Tensor], str, list[int]]:
    return quantize((48, 64), nested=False).operands


def nested() -> tuple[list[Tensor], str, list[int]]:
    return quantize((48, 64), nested=True).operands


def replaced(
    case: tuple[list[Tensor], str, list[int]], index: int, change: Callable[[Tensor], Tensor]
) -> tuple[list[Tensor], str, list[int]]:
    operands, name, shape = case
    operands[index] = change(operands[index])
    return operands, name, shape


CORRUPT: list[tuple[str, Callable[[], tuple[list[Tensor], str, list[int]]], str]] = [
    (
        "packed weight of another shape",
        lambda: (plain()[0], "nf4_b64", [48, 128]),
        "packed weight should be 3072 bytes for shape (48, 128), is 1536 bytes. " + REMEDY,
    ),
    (
        "packed weight too long",
        lambda: (plain()[0], "nf4_b64", [47, 64]),
        "packed weight should be 1504 bytes for shape (47, 64), is 1536 bytes. " + REMEDY,
    ),
    (
        "absmax of another blocksize",
        lambda: (plain()[0], "nf4_b128", [48, 64]),
        "number of elements of absmax should be 24, is 48. " + REMEDY,
    ),
    (
        "absmax cut off",
        lambda: replaced(plain(), 1, lambda t: t[:-1]),
        "number of elements of absmax should be 48, is 47. " + REMEDY,
    ),
    (
        "nested absmax in float",
        lambda: replaced(nested(), 1, lambda t: t.float()),
        "dtype of absmax should be torch.uint8, is torch.float32. " + REMEDY,
    ),
    (
        "codebook cut off",
        lambda: replaced(nested(), 2, lambda t: t[:16]),
        "number of elements of nested_codebook should be 256, is 16. " + REMEDY,
    ),
    (
        "nested absmax too long",
        lambda: replaced(nested(), 3, lambda t: t.repeat(2)),
        "number of elements of nested_absmax should be 1, is 2. " + REMEDY,
    ),
    (
        "two offsets",
        lambda: replaced(nested(), 4, lambda t: torch.stack([t, t])),
        "number of elements of nested_offset should be 1, is 2. " + REMEDY,
    ),
    (
        "operands of the nested format",
        lambda: (nested()[0], "nf4_b64", [48, 64]),
        "number of operands of nf4_b64 should be 2 (qweight, absmax), is 5. "
        "Pass the operands in the order of FORMATS[format].operands.",
    ),
    (
        "two devices",
        lambda: replaced(plain(), 1, lambda t: t.to("meta")),
        "device of the operands of nf4_b64 should be one device, is qweight on cpu, "
        "absmax on meta. Move the quantization state with the weight: module.to(device).",
    ),
]


@pytest.mark.parametrize(
    ("make", "text"), [row[1:] for row in CORRUPT], ids=[r[0] for r in CORRUPT]
)
def test_corrupt_state(make: Callable[[], tuple[list[Tensor], str, list[int]]], text: str) -> None:
    operands, name, shape = make()
    calls: list[Callable[[], Tensor]] = [
        lambda: ops.dequantize(operands, name, shape, torch.bfloat16),
        lambda: QFUSE.dequantize(operands, name, shape, torch.bfloat16),
    ]
    if len({t.device for t in operands}) == 1:  # else `linear` names the one that is not with x
        calls.append(lambda: ops.linear(torch.ones(2, shape[1]), operands, name, shape))
    for call in calls:
        with pytest.raises(exc.CorruptQuantState) as error:
            call()
        assert str(error.value) == f"corrupt quantization state: {text}"


def test_corrupt_state_of_bitsandbytes() -> None:
    """The state of one weight with the packed bytes of another, as after a bad checkpoint load."""
    w, other = quantize((48, 64)), quantize((24, 64))
    with pytest.raises(exc.CorruptQuantState) as error:
        inductor_q.dequantize(other.packed, w.state)
    assert str(error.value) == (
        "corrupt quantization state: packed weight should be 1536 bytes for shape (48, 64), "
        f"is 768 bytes. {REMEDY}"
    )


def test_corrupt_state_while_compiling() -> None:
    operands, name, _ = plain()
    compiled = torch.compile(
        lambda *t: ops.dequantize(t, name, [48, 128], torch.bfloat16), backend="eager"
    )
    with pytest.raises(Exception, match="packed weight should be 3072 bytes") as error:
        compiled(*operands)
    assert "corrupt quantization state" in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_wrong_dtype(dtype: torch.dtype) -> None:
    w = quantize((48, 64))
    text = f"dequantized weight is {dtype}, expected {FLOATS}. Cast it with .to(...)"
    calls: list[Callable[[], Tensor]] = [
        lambda: ops.dequantize(*w.operands, dtype),
        lambda: inductor_q.dequantize(w.packed, w.state, dtype=dtype),
        lambda: ops.linear(torch.ones(2, 64).to(dtype), *w.operands),
    ]
    for call in calls:
        with pytest.raises(exc.WrongDtype) as error:
            call()
        assert str(error.value) == text
        assert isinstance(error.value, TypeError)


@pytest.mark.parametrize(
    ("index", "name"),
    [(1, "absmax"), (2, "nested_codebook"), (3, "nested_absmax"), (4, "nested_offset")],
)
def test_wrong_dtype_of_a_scale(index: int, name: str) -> None:
    case = plain() if name == "absmax" else nested()
    operands, fmt, shape = replaced(case, index, lambda t: t.to(torch.int64))
    with pytest.raises(exc.WrongDtype) as error:
        ops.dequantize(operands, fmt, shape, torch.bfloat16)
    assert str(error.value) == f"{name} is torch.int64, expected {FLOATS}. Cast it with .to(...)"


@pytest.mark.parametrize(
    ("out", "kind", "text"),
    [
        (
            torch.empty(64, 48),
            exc.WrongShape,
            "out has shape (64, 48), expected (48, 64). Check which weight the operands belong to",
        ),
        (
            torch.empty(48, 64, dtype=torch.float16),
            exc.WrongDtype,
            "out is torch.float16, expected (torch.float32,). Cast it with .to(...)",
        ),
    ],
    ids=["shape", "dtype"],
)
def test_wrong_out(out: Tensor, kind: type[exc.QfuseError], text: str) -> None:
    with pytest.raises(kind) as error:
        QFUSE.dequantize.out(*plain(), torch.float32, out=out)
    assert str(error.value) == text


@pytest.mark.parametrize(("shape", "got"), [((2, 32), "(2, 32)"), ((), "()"), ((64, 2), "(64, 2)")])
def test_wrong_input(shape: tuple[int, ...], got: str) -> None:
    case = layer()
    x = torch.ones(shape)
    calls: list[Callable[[], Tensor]] = [
        lambda: ops.linear(x, *case.w.operands),
        lambda: ops.lora_linear(x, *case.w.operands, case.a, case.b, case.scaling),
    ]
    for call in calls:
        with pytest.raises(exc.WrongShape) as error:
            call()
        assert str(error.value) == (
            f"input of a quantized linear layer has shape {got}, expected ('...', 64). "
            "Check which weight the operands belong to"
        )


META = "meta, expected cpu. Move it with .to(...)"


@pytest.mark.parametrize(
    ("move", "text"),
    [
        ("x", "quantized weight is on cpu, expected meta. Move it with .to(...)"),
        ("absmax", f"quantized weight is on {META}"),
        ("A", f"adapter is on {META}"),
        ("B", f"adapter is on {META}"),
        ("bias", f"bias is on {META}"),
    ],
)
def test_wrong_device(move: str, text: str) -> None:
    """As after an offload: torch would call the fake, and memory that nobody wrote come back."""
    case = layer()
    operands, name, shape = case.w.operands
    assert case.bias is not None
    if move == "x":
        case.x = case.x.to("meta")
    elif move == "absmax":
        operands[1] = operands[1].to("meta")
    elif move == "A":
        case.a[0] = case.a[0].to("meta")
    elif move == "B":
        case.b[0] = case.b[0].to("meta")
    else:
        case.bias = case.bias.to("meta")
    weight = (operands, name, shape)
    if move not in ("A", "B"):
        with pytest.raises(exc.WrongDevice) as error:
            ops.linear(case.x, *weight, bias=case.bias)
        assert str(error.value) == text
    with pytest.raises(exc.WrongDevice) as error:
        ops.lora_linear(case.x, *weight, case.a, case.b, case.scaling, bias=case.bias)
    assert str(error.value) == text


@pytest.mark.parametrize("which", ["A", "B", "swapped"])
def test_wrong_adapter(which: str) -> None:
    case = layer(ranks=(4, 2))
    if which == "A":
        case.a[1] = torch.ones(2, 65)
    elif which == "B":
        case.b[1] = torch.ones(47, 2)
    else:
        case.b[1] = case.b[1].detach().t()
    got = (tuple(case.a[1].shape), tuple(case.b[1].shape))
    with pytest.raises(exc.WrongShape) as error:
        case()
    assert str(error.value) == (
        f"adapter 1 (A, B) of a weight (48, 64) has shape {got}, expected ((2, 64), (48, 2)). "
        "Check which weight the operands belong to"
    )


def test_unknown_format() -> None:
    operands, _, shape = plain()
    for call in (ops.dequantize, QFUSE.dequantize):
        with pytest.raises(exc.UnknownFormat, match="no quantization format 'nf4_64'; did you"):
            call(operands, "nf4_64", shape, torch.bfloat16)


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
def test_gpu_compiled_equals_eager_bitwise(backend: Any) -> None:
    weights = [
        quantize((64, 256), quant_type, nested=nested, device="cuda")
        for quant_type, nested in itertools.product(QUANT_TYPES, (False, True))
    ]

    def every(packed: list[Tensor]) -> list[Tensor]:
        return [
            inductor_q.dequantize(p, w.state, dtype=dtype)
            for p, w in zip(packed, weights, strict=True)
            for dtype in DTYPES
        ]

    packed = [w.packed for w in weights]
    compiled = torch.compile(every, backend=backend, fullgraph=True)
    for actual, expected in zip(compiled(packed), every(packed), strict=True):
        assert_same_bits(actual, expected)


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
