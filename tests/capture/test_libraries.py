"""What each library of the list says of its modules, and of the graphs that they make."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

import inductor_q
from inductor_q import capture, kbit, ops, testing
from inductor_q.capture import LIBRARIES
from inductor_q.capture.bitsandbytes import BITSANDBYTES
from inductor_q.capture.bnb_graph import GEMV, INT8_PRODUCT, overload
from inductor_q.capture.library import Decoded, Library, Linear, Match, Refused
from inductor_q.capture.own import OWN
from inductor_q.capture.transformers import TRANSFORMERS
from inductor_q.exc import CorruptQuantState, UnreadWeight, UnsupportedBlocksize
from inductor_q.experts.packing import pack
from inductor_q.experts.stack import ExpertStack
from inductor_q.formats import FORMATS
from tests.support.compiling import compile_step, no_codegen, step
from tests.support.moe_models import model

bnb: Any = pytest.importorskip("bitsandbytes")

BF16 = torch.bfloat16
N, K = 128, 64


def values() -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(0)).to(BF16)


def traced(module: Any) -> list[fx.Node]:
    """The calls of the inference graph of `module`."""
    graphs: list[fx.Graph] = []

    def keep(gm: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm.graph)
        return gm.forward

    torch.compiler.reset()
    with torch.no_grad():
        run: Any = torch.compile(module, backend=aot_autograd(fw_compiler=keep))
        run(torch.ones(8, K, dtype=BF16))
    return [node for node in graphs[0].nodes if node.op == "call_function"]


def matched(module: Any, library: Library) -> list[Match]:
    """What `library` finds in the graph of `module`, which the list finds as well, and no other."""
    nodes = traced(module)
    found = [library.match(node) for node in nodes]
    assert [capture.match(node) for node in nodes] == found
    return [one for one in found if one is not None]


# --- bitsandbytes -------------------------------------------------------------------------------


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_linear_4bit(quant_type: str, nested: bool) -> None:
    layer = testing.quantized_linear(
        values(), torch.ones(N, dtype=BF16), quant_type=quant_type, nested=nested
    )
    name = f"{quant_type}_b64" + "_nested" * nested
    packed = BITSANDBYTES.packed(layer, "weight")
    assert packed is not None and packed.read is not None
    assert (packed.format, packed.kind, packed.shape) == (quant_type, "linear", (N, K))
    operands, format, shape = packed.read()
    assert (format, shape, len(operands)) == (name, [N, K], 5 if nested else 2)
    want = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    assert torch.equal(ops.dequantize(operands, format, shape, BF16), want)
    assert BITSANDBYTES.packed(layer, "bias") is None

    (found,) = matched(layer, BITSANDBYTES)
    assert isinstance(found, Linear)
    assert found.kernel == "bitsandbytes' kernel"
    assert (found.weight.format, found.weight.shape) == (name, (N, K))
    assert len(found.weight.operands) == len(operands)
    assert found.bias is not None and not found.adapters


DAMAGED = """
absmax shape blocksize dtype offset state2 state2.absmax state2.code state2.blocksize
"""


@pytest.mark.parametrize("value", [None, 5], ids=["missing", "a number"])
@pytest.mark.parametrize("path", DAMAGED.split())
def test_a_damaged_quant_state_is_our_own_error(path: str, value: object) -> None:
    layer = testing.quantized_linear(values())
    state = layer.weight.quant_state
    of, _, name = path.rpartition(".")
    setattr(getattr(state, of) if of else state, name, value)
    with pytest.raises((CorruptQuantState, UnsupportedBlocksize), match=f"{name}|nested") as raised:
        inductor_q.dequantize(layer.weight.data, state)
    if value is None:
        assert str(raised.value).endswith(
            "is missing. Quantize the weight again, or load its state whole."
        )


@pytest.mark.parametrize("path", DAMAGED.replace(" dtype", "").split())
def test_a_damaged_quant_state_is_found_in_a_model(path: str) -> None:
    """Of that layer alone, and once, though the layer and its weight have it."""
    layers = {name: testing.quantized_linear(values()) for name in ("up", "down")}
    model, state = nn.ModuleDict(layers), layers["up"].weight.quant_state
    assert not capture.damaged(model)
    of, _, name = path.rpartition(".")
    setattr(getattr(state, of) if of else state, name, None)
    [(layer, error)] = capture.damaged(model)
    assert (layer, error.got) == ("up", "missing")
    assert error.what == ("nested " * bool(of) + name)
    with pytest.raises(CorruptQuantState, match=f"{name} of up should be a .*, is missing"):
        inductor_q.compile(model)


def test_dequantize_4bit() -> None:
    state = testing.quantized_linear(values()).weight

    class Dequantize(nn.Module):
        def forward(self, x: Tensor) -> Any:
            weight = bnb.functional.dequantize_4bit(state.data, state.quant_state)
            return x @ weight.to(BF16).t()

    (found,) = matched(Dequantize(), BITSANDBYTES)
    assert isinstance(found, Decoded)
    assert (found.weight.format, found.dtype) == ("nf4_b64_nested", BF16)


@pytest.mark.parametrize("storage", [torch.uint8, BF16])
def test_a_weight_by_itself_is_decoded(storage: torch.dtype) -> None:
    weight = testing.quantized_linear(values(), quant_storage=storage).weight
    expected = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
    for given in ((weight,), (weight, weight.quant_state), (weight.data, weight.quant_state)):
        assert torch.equal(inductor_q.dequantize(*given), expected)
    plain = torch.randn(4, 4)
    assert inductor_q.dequantize(plain) is plain
    with pytest.raises(UnreadWeight, match="they say nothing of how to read"):
        inductor_q.dequantize(weight.data.view(torch.uint8))


def call(name: str, **arguments: Any) -> Any:
    """A call of an op of bitsandbytes on placeholders A, B and absmax."""
    graph = fx.Graph()
    tensors = {key: graph.placeholder(key) for key in ("A", "B", "absmax")}
    node = graph.call_function(overload(name), kwargs={**tensors, **arguments})
    node.meta["val"] = torch.empty(8, N, device="meta")
    return node


@pytest.mark.parametrize(
    ("quant_type", "blocksize", "reason"),
    [
        ("int3", 64, "unknown quant_type 'int3'"),
        ("nf4_b64", 64, "unknown quant_type 'nf4_b64'"),
        ("nf4", 48, "unsupported blocksize 48"),
    ],
)
def test_refused(quant_type: str, blocksize: int, reason: str) -> None:
    """With the reason and the weight; the call is a product all the same."""
    for name, shape, weight in (("gemm_4bit", "shapeB", "B"), ("dequantize_4bit", "shape", "A")):
        arguments = {"quant_type": quant_type, "blocksize": blocksize, shape: (N, K)}
        node = call(name, **arguments)
        assert capture.match(node) == Refused(node, node.kwargs[weight], reason)
        assert capture.is_product(node) == (name == "gemm_4bit")


def test_gemv_is_refused() -> None:
    node = call("gemv_4bit")
    assert capture.match(node) == Refused(node, node.kwargs["B"], GEMV)
    assert not capture.is_product(node)


def linear_8bit(threshold: float = 0.0) -> Any:
    layer = bnb.nn.Linear8bitLt(K, N, bias=False, has_fp16_weights=False, threshold=threshold)
    layer.weight.data.copy_(values())
    return layer.to("cpu")


@pytest.mark.parametrize("called", [False, True])
def test_linear_8bit(called: bool) -> None:
    """The scales move from the weight to the layer's state in the first call."""
    layer = linear_8bit()
    if called:
        with torch.no_grad():
            layer(torch.randn(2, K).to(BF16))
    packed = BITSANDBYTES.packed(layer, "weight")
    assert packed is not None and packed.read is not None
    assert (packed.format, packed.kind, packed.shape) == ("int8", "linear", (N, K))
    operands, format, shape = packed.read()
    assert (format, shape) == ("int8_absmax", [N, K])
    absmax = layer.state.SCB if called else layer.weight.SCB
    codes = layer.weight.data.to(torch.float16)
    # as bitsandbytes' backward has it
    expected = codes.mul_(absmax.unsqueeze(1).mul(1.0 / 127.0))
    assert torch.equal(ops.dequantize(operands, format, shape, torch.float16), expected)
    assert capture.packed_weight(layer, "bias") is None


def test_a_layer_that_is_not_quantized_yet() -> None:
    layer = bnb.nn.Linear8bitLt(K, N, bias=False, has_fp16_weights=False)
    packed = BITSANDBYTES.packed(layer, "weight")
    assert packed is not None and packed.read is None
    assert packed.reason.startswith("bitsandbytes quantizes it in its first call")


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_the_decode_of_8_bits(threshold: float, dtype: torch.dtype) -> None:
    """Forward and backward of training decode the weight, whatever the threshold for outliers."""
    peft: Any = pytest.importorskip("peft")
    run = nn.Sequential(OrderedDict(proj=linear_8bit(threshold)))
    lora = peft.LoraConfig(r=8, target_modules=["proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(lora, run)
    for parameter in testing.adapter_parameters(run.train()):
        parameter.data = parameter.data.to(dtype)
    x = torch.randn(4, K, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    expected, gradients = step(run, x, module=run)
    with no_codegen():
        result = compile_step(run, x, fullgraph=True)
    assert result.applied["canonicalize"] == 2 and result.applied["extend_k"] >= 1
    assert [v.status for v in result.report.verdicts().values()] == ["fused"]
    assert gradients.keys() == result.gradients.keys()
    bound = 1e-5 if dtype is torch.float32 else 2**-6
    assert testing.relative_error(result.output, expected) < bound
    assert testing.relative_error(result.gradients["x0"], gradients["x0"]) < bound


def test_a_product_of_8_bit_codes_is_left_to_bitsandbytes() -> None:
    layer = linear_8bit().eval()
    with torch.no_grad(), no_codegen():
        result = compile_step(lambda x: layer(x), torch.randn(4, K).to(BF16))
    assert result.reasons["canonicalize"] == {INT8_PRODUCT: 1}


@pytest.mark.parametrize("flat", [False, True], ids=["stack", "flat"])
def test_parametrized_experts(flat: bool) -> None:
    """Under the parameter's name, and where torch keeps the original."""
    module = nn.Module()
    stacked = values().reshape(2, N // 2, K)
    module.up_proj = nn.Parameter(values() if flat else stacked, requires_grad=False)
    parametrize = importlib.import_module("bitsandbytes.nn.parametrize")
    parametrize.replace_parameter_4bit(module, "up_proj", compress_statistics=False)
    packed = BITSANDBYTES.packed(module, "up_proj")
    assert packed is not None and packed.read is not None
    assert (packed.format, packed.kind) == ("nf4", "linear" if flat else "experts")
    operands, format, shape = packed.read()
    assert (format, [*packed.shape]) == ("nf4_b64", shape)
    assert torch.equal(ops.dequantize(operands, format, shape, BF16), module.up_proj)
    parametrized: Any = module.parametrizations
    again = BITSANDBYTES.packed(parametrized.up_proj, "original")
    assert again is not None and (again.format, again.shape) == (packed.format, packed.shape)


@pytest.mark.parametrize("format", ["nf4_b64", "fp4_b128", "nf4_b256_nested"])
def test_what_bitsandbytes_writes_is_what_is_read(format: str) -> None:
    fmt = FORMATS[format]
    operands = BITSANDBYTES.quantizers[fmt](values(), fmt)
    for operand, need in zip(operands, fmt.requirements((N, K)), strict=True):
        assert operand.numel() == need.numel
    error = ops.dequantize(operands, format, (N, K), BF16) - values()
    assert float(error.norm() / values().norm()) < 0.15


# --- our own ------------------------------------------------------------------------------------


def test_kbit_linear() -> None:
    weight = kbit.quantize(values(), 3)
    layer = kbit.KBitLinear(weight)
    packed = OWN.packed(layer, "qweight")
    assert packed is not None and packed.read is not None
    assert (packed.format, packed.kind, packed.shape) == ("kbit3_e4m4", "linear", (N, K))
    operands, format, shape = packed.read()
    assert torch.equal(ops.dequantize(operands, format, shape, BF16), layer.dequantize())
    assert OWN.packed(layer, "absmax") is None

    (found,) = matched(layer, OWN)
    assert isinstance(found, Linear)
    assert (found.weight.format, found.weight.shape) == ("kbit3_e4m4", (N, K))
    assert not found.kernel and not found.adapters and found.bias is None


def test_linear_with_an_adapter() -> None:
    weight = kbit.quantize(values(), 4)
    a, b = torch.ones(8, K, dtype=BF16), torch.ones(N, 8, dtype=BF16)

    def run(x: Tensor) -> Tensor:
        operands, shape = weight.operands, weight.shape
        return ops.lora_linear(x, operands, weight.format, shape, [a], [b], [2.0])

    (found,) = matched(run, OWN)
    assert isinstance(found, Linear)
    ((left, right, scaling),) = found.adapters
    assert (left.meta["val"].shape, right.meta["val"].shape, scaling) == ((8, K), (N, 8), 2.0)


@pytest.mark.parametrize("format", ["nf4_b64_nested", "kbit2_fp16"])
def test_expert_stack(format: str) -> None:
    stack = ExpertStack(pack(torch.randn(2, N, K), format), format, (2, N, K), transposed=False)
    packed = OWN.packed(stack, FORMATS[format].operands[0])
    assert packed is not None and packed.read is not None
    assert (packed.format, packed.kind, packed.shape) == (format, "experts", (2, N, K))
    read = packed.read()
    assert all(one is other for one, other in zip(read.operands, stack.operands, strict=True))
    dense = ExpertStack({"weight": torch.ones(2, N, K)}, "dense", (2, N, K), transposed=False)
    assert OWN.packed(dense, "weight") is None


# --- transformers, and what is nobody's ---------------------------------------------------------


def test_layers_of_experts() -> None:
    net = model("qwen3_moe")
    found = [name for name, module in net.named_modules() if TRANSFORMERS.holds_experts(module)]
    assert found == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert [n for n, module in net.named_modules() if capture.holds_experts(module)] == found
    experts = net.get_submodule(found[0])
    assert capture.packed_weight(experts, "gate_up_proj") is None


def test_products_with_experts() -> None:
    weight, offs = torch.ones(2, K, N, dtype=BF16), torch.tensor([3, 8], dtype=torch.int32)
    nodes = traced(lambda x: torch._grouped_mm(x, weight, offs))
    (product,) = [node for node in nodes if node.target is torch.ops.aten._grouped_mm.default]
    reason = "the experts are dense: torch's grouped product reads them as they are"
    assert TRANSFORMERS.find_experts(product.graph) == ([], {product: reason})
    assert capture.find_experts(product.graph) == ([], {product: reason})
    assert BITSANDBYTES.find_experts(product.graph) == ([], {})


def test_a_dense_layer_is_nobodys() -> None:
    layer = nn.Linear(K, N, dtype=BF16)
    assert capture.packed_weight(layer, "weight") is None
    assert capture.packed_weight(layer, "no_such_name") is None
    assert not any(capture.match(node) for node in traced(layer))
    assert not any(capture.is_product(node) for node in traced(layer))


def test_the_list() -> None:
    assert [library.name for library in LIBRARIES] == [
        "inductor_q",
        "bitsandbytes",
        "transformers",
        "torchao",
    ]
    assert [n for library in LIBRARIES for n in library.namespaces] == ["qfuse", "bitsandbytes"]
