"""The `qfuse::` ops: schema, semantics, and one op node where torch traces."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import inductor_q
from inductor_q import ops
from inductor_q.backend import qfuse
from tests.support.op_layers import layer
from tests.support.quantized import (
    DTYPES,
    QUANT_TYPES,
    assert_same_as_native,
    assert_same_bits,
    by_table,
    needs_0_50,
    quantize,
)

QFUSE = torch.ops.qfuse
BACKENDS = [pytest.param("inductor", id="inductor"), pytest.param(qfuse, id="qfuse")]


pytestmark = pytest.mark.usefixtures("fresh_compiler")


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


@pytest.mark.parametrize("gated", [False, True])
def test_opcheck_linears(gated: bool) -> None:
    """It has no gradient: it is for inference."""
    case = layer(bias=True)
    operands, fmt, shape = case.w.operands
    n, a, b = shape[0], case.a[0].detach(), case.b[0].detach()
    bias = None if case.bias is None else case.bias.detach()
    given = (case.x.detach(), [*operands, *operands], fmt, [n, n], [None, bias], [a, None])
    opcheck(
        QFUSE.linears.default,
        (*given, [b, None], [2.0, 1.0], gated),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"),
    )


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
    opcheck(QFUSE.extend.default, ([x, other], [x, other], [p, q], 3))
    opcheck(QFUSE.extend.default, ([x.detach()], [x.detach()], [p.detach()], 0))


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


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_state_under_dynamic_shapes(nested: bool) -> None:
    """Dynamo makes numbers of the state symbolic then, the blocksize too."""
    weights = [quantize((6, 256), blocksize=blocksize, nested=nested) for blocksize in (64, 128)]

    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def f(packed: Tensor, state: Any) -> Tensor:
        return inductor_q.dequantize(packed, state)

    for w in weights:
        assert_same_bits(f(w.packed, w.state), by_table(w.packed, w.state))


# --- on a GPU -----------------------------------------------------------------------------------


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
