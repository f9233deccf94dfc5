"""torchao's weights, made by torchao: what is read of them, what passes make of their layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import inductor_q
from inductor_q import capture, ops, testing
from inductor_q.capture import torchao
from inductor_q.capture.library import Stored
from inductor_q.formats import FORMATS
from inductor_q.kernels import dequantize_triton
from inductor_q.kernels.calls import Dequantize
from inductor_q.passes.unwrap_weights import IN_REGION, NO_PRODUCT, TRAINS
from tests.support.captured import CapturedStage
from tests.support.compiling import Compiled, compile_step, no_codegen, partition, step
from tests.support.quantized import assert_same_bits
from tests.support.torchao_weights import (
    BF16,
    CONFIGS,
    Adapted,
    int4_plain,
    int4_tiles,
    linear,
    mx,
    nf4,
    pack_tiles,
    quantization,
    quantize_,
    quantized_tiles,
    with_parts,
)

N, K = 128, 256
INT4: Any = vars(torch)["int4"]
DEQUANTIZE = torch.ops.qfuse.dequantize.default


def read(weight: Any, shape: Sequence[int] = (N, K)) -> Stored:
    module = nn.Module()
    module.weight = nn.Parameter(weight, requires_grad=False)
    packed = capture.packed_weight(module, "weight")
    assert packed is not None and packed.read is not None, packed
    assert packed.shape == tuple(shape)
    assert (packed.format, packed.kind) == (type(weight).__name__, "linear")
    return packed.read()


def values(weight: Any, dtype: torch.dtype = BF16) -> Tensor:
    operands, name, shape = read(weight)
    return ops.dequantize(operands, name, shape, dtype)


# --- what is stored -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CONFIGS)
def test_values_are_torchaos_own(case: str) -> None:
    config, name = CONFIGS[case]
    weight = linear(config).weight
    assert read(weight).format == name
    assert_same_bits(values(weight), weight.dequantize())


@pytest.mark.parametrize("case", CONFIGS)
def test_every_code_under_every_scale(case: str) -> None:
    """All codes of a byte, all zero points, and scales of any size."""
    generator = torch.Generator().manual_seed(0)

    def change(name: str, part: Tensor) -> Tensor:
        if part.dtype.itemsize == 1:
            codes = torch.arange(part.numel()).to(torch.uint8)
            if name != "qdata":
                codes = codes[torch.randperm(part.numel(), generator=generator)]
            return codes.view(part.dtype).reshape(part.shape)
        powers = torch.randint(-40, 40, part.shape, generator=generator)
        return (part.float().abs() * 2.0**powers).to(part.dtype)

    weight = with_parts(linear(CONFIGS[case][0]).weight, change)
    assert_same_bits(values(weight), weight.dequantize())


def quantized(name: str, **more: Any) -> Any:
    return getattr(quantization, name)(**more)


REFUSED: dict[str, tuple[Any, str]] = {
    "activations in 8 bits": (
        quantized("Int8DynamicActivationInt8WeightConfig"),
        torchao.ACTIVATIONS,
    ),
    "activations in float8": (
        quantized("Int8DynamicActivationIntxWeightConfig", weight_dtype=INT4),
        torchao.ACTIVATIONS,
    ),
    "group of 16": (
        quantized("IntxWeightOnlyConfig", granularity=quantization.PerGroup(16)),
        "it would be int8_g16, and there is no such format here",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_layout_that_is_not_read(case: str) -> None:
    config, reason = REFUSED[case]
    layer = linear(config)
    packed = capture.packed_weight(layer, "weight")
    assert packed is not None
    assert (packed.read, packed.reason) == (None, reason)
    result = compile_and_step(layer)
    assert result.reasons["unwrap_weights"] == {reason: 1}
    assert not result.applied.get("canonicalize")


def test_a_layout_that_only_a_kernel_knows() -> None:
    opaque: Any = pytest.importorskip("torchao.prototype.quantization.int4.int4_opaque_tensor")
    weight = opaque.Int4OpaqueTensor.from_hp(torch.randn(64, 128, dtype=BF16), [1, 64])
    layout = capture.layout(weight)
    assert layout is not None
    assert layout.reason == torchao.OPAQUE.format("Int4OpaqueTensor")


def test_zero_points_that_are_no_integers() -> None:
    def change(name: str, part: Tensor) -> Tensor:
        return part.to(BF16) if name == "zero_point" else part

    weight = with_parts(linear(CONFIGS["intx4 row"][0]).weight, change)
    layout = capture.layout(weight)
    assert layout is not None and layout.reason == torchao.NO_ZERO_POINT


def test_a_class_that_nothing_is_known_of() -> None:
    kind = type("Int3Tensor", (torch.Tensor,), {"__module__": "torchao.some"})
    layout = capture.layout(torch.ones(2, 2).as_subclass(kind))
    assert layout is not None
    assert layout.reason == "it is torchao's Int3Tensor, which none of our formats describes"
    assert capture.layout(nn.Parameter(torch.ones(2))) is None
    assert capture.layout(torch.ones(2).as_subclass(type("Own", (torch.Tensor,), {}))) is None


def test_nf4_tensor() -> None:
    """Every code under every scale, of which each step is rounded to bfloat16."""
    generator = torch.Generator().manual_seed(3)

    def change(name: str, part: Tensor) -> Tensor:
        if part.dtype.itemsize == 1:
            codes = torch.randint(256, part.shape, generator=generator)
            return codes.to(torch.uint8).view(part.dtype)
        return part * 3.7

    for weight in (nf4(), with_parts(nf4(), change)):
        operands, name, shape = read(weight)
        assert name == "nf4_tensor_b64"
        assert_same_bits(ops.dequantize(operands, name, shape, BF16), weight.get_original_weight())

        compiled: Any = torch.compile(ops.dequantize, backend="qfuse", fullgraph=True)
        assert_same_bits(compiled(operands, name, shape, BF16), weight.get_original_weight())
    for dtype, block in ((torch.float32, 64), (BF16, 128)):
        other = quantization.to_nf4(torch.randn(256, 256, dtype=dtype), block, 256)
        layout = capture.layout(other)
        assert layout is not None and layout.reason == torchao.NF4


@pytest.mark.usefixtures("graph_or_code")
def test_a_layer_of_nf4_tensor() -> None:
    layer = nn.Linear(K, N, bias=False, dtype=BF16)
    layer.weight = nn.Parameter(nf4(), requires_grad=False)
    module, x = Adapted(layer), inputs()
    expected, gradients = step(module, x, module=module)
    result = compile_step(module, x, fullgraph=True)
    assert result.applied["extend_k"] == 1
    assert testing.relative_error(result.output, expected) < 2**-7
    for key, gradient in gradients.items():
        assert testing.relative_error(result.gradients[key], gradient) < 2**-6, key


MX = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2")


@pytest.mark.parametrize("name", MX)
def test_mx_formats(name: str) -> None:
    """Every code under every power of two."""

    def change(part: str, codes: Tensor) -> Tensor:
        return torch.arange(codes.numel()).to(torch.uint8).view(codes.dtype).reshape(codes.shape)

    for weight in (mx(name), with_parts(mx(name), change)):
        assert_same_bits(values(weight), weight.dequantize())
    x = inputs()
    weight = mx(name)
    with no_codegen():
        result = compile_step(lambda x: F.linear(x, weight.dequantize()), x, fullgraph=True)
    assert result.applied["unwrap_weights"] == result.applied["canonicalize"] == 1


def sample(name: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return what is said of what torchao made elsewhere, and the tensors."""
    safetensors: Any = pytest.importorskip("safetensors")
    path = Path(__file__).parent / "samples" / f"{name}.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def plain_of_mslk(group: int) -> tuple[Any, Tensor]:
    """Return an `Int4Tensor` of what mslk's quantizer made, and what torchao decoded of it."""
    _, parts = sample("torchao_plain")
    qdata, scale, zero_point, exact = (
        parts[f"g{group}.{name}"] for name in ("qdata", "scale", "zero_point", "values")
    )
    weight = quantization.Int4Tensor(qdata, scale, zero_point, [1, group], exact.shape)
    return weight, exact.double()


def tiles_of_torchao(algorithm: str) -> tuple[Any, Tensor]:
    source = torch.randn(24, K, generator=torch.Generator().manual_seed(4)).to(BF16)
    return quantized_tiles(source, 64, algorithm)


GPU_LAYOUTS = {
    "plain": lambda: int4_plain(N, K, 64),
    "plain, by mslk, 32": lambda: plain_of_mslk(32),
    "plain, by mslk, 64": lambda: plain_of_mslk(64),
    "tiles": lambda: int4_tiles(N, K, 32),
    "tiles, padded": lambda: int4_tiles(5, 1100, 128),
    "tiles, by torchao": lambda: tiles_of_torchao("tinygemm"),
    "tiles, by HQQ": lambda: tiles_of_torchao("hqq"),
}


@pytest.mark.parametrize("case", GPU_LAYOUTS)
def test_int4_layouts_of_gpus(case: str) -> None:
    weight, exact = GPU_LAYOUTS[case]()
    operands, name, shape = read(weight, exact.shape)
    assert name.startswith(f"int4_{case.split(',')[0]}_g")
    assert_same_bits(ops.dequantize(operands, name, shape, torch.float32), exact.float())
    assert_same_bits(ops.dequantize(operands, name, shape, BF16), exact.float().to(BF16))


@pytest.mark.parametrize("group", [32, 64])
def test_plain_is_near_the_weight_that_mslk_quantized(group: int) -> None:
    said, parts = sample("torchao_plain")
    assert said["library"].startswith("torchao ") and "mslk 1.1.0" in said["packed_by"]
    assert "'plain'" in said["packed_by"] and "_int4_row_dequantize_zp" in said["decoded_by"]
    weight, exact = plain_of_mslk(group)
    assert exact.unique().numel() >= 64
    scale, zero_point = (
        t.double().t().repeat_interleave(group, 1) for t in (weight.scale, weight.zero_point)
    )
    # Half a step, and what rounding the scale and the zero point to bfloat16 moves.
    bound = scale / 2 + (8 * scale + zero_point.abs()) * 2**-8
    operands, name, shape = read(weight, exact.shape)
    values = ops.dequantize(operands, name, shape, torch.float32)
    assert ((values - parts["weight"].double()).abs() <= bound).all()


def test_zero_points_of_hqq() -> None:
    """HQQ moves the zero points, and its values are nearer to the weight."""
    source = torch.randn(24, K, generator=torch.Generator().manual_seed(4)).to(BF16)
    found, errors = {}, {}
    for algorithm in ("tinygemm", "hqq"):
        weight, _ = tiles_of_torchao(algorithm)
        found[algorithm] = weight.scale_and_zero[: K // 64, :, 1]
        operands, name, shape = read(weight, source.shape)
        values = ops.dequantize(operands, name, shape, torch.float32)
        errors[algorithm] = testing.relative_error(values, source)
    assert (found["hqq"] != found["tinygemm"]).float().mean() > 0.9
    # A step is a fifteenth of a group's range, and 64 normal numbers span about 4.7 deviations.
    assert errors["hqq"] < errors["tinygemm"] < 1.1 * 4.7 / 15 / 12**0.5


def test_tiles_that_torchao_packed_on_a_gpu() -> None:
    """Their values are those of torch's own kernel, which multiplied them with the identity."""
    said, parts = sample("torchao_tiles")
    assert said["library"].startswith("torchao ")
    assert "tile_packed_to_4d" in said["packed_by"] and "_weight_int4pack_mm" in said["decoded_by"]
    exact = parts["values"]
    assert exact.dtype is BF16 and exact.unique().numel() >= 64
    weight = quantization.Int4TilePackedTo4dTensor(
        parts["qdata"], parts["scale_and_zero"], [1, 64], exact.shape
    )
    operands, name, shape = read(weight, exact.shape)
    assert name == "int4_tiles_g64"
    assert_same_bits(ops.dequantize(operands, name, shape, BF16), exact)


def test_codes_are_laid_out_as_the_gpu_has_them() -> None:
    """The other tests of tiles stand on `pack_tiles`."""
    _, parts = sample("torchao_tiles")
    pairs = parts["scale_and_zero"].double().repeat_interleave(64, 0)
    scale, zero_point = (t.t() for t in pairs.unbind(2))
    codes = ((parts["values"].double() - zero_point) / scale).round().to(torch.int64) + 8
    assert torch.equal(pack_tiles(codes), parts["qdata"])


@pytest.mark.parametrize("case", ["tiles", "tiles, padded"])
def test_tiles_are_read_where_torchao_has_them(case: str) -> None:
    """Kernels refuse an operand that is a strided view."""
    weight, exact = GPU_LAYOUTS[case]()
    operands, name, shape = read(weight, exact.shape)
    stored = (weight.qdata, weight.scale_and_zero)
    assert [t.data_ptr() for t in operands] == [t.data_ptr() for t in stored]
    assert all(t.is_contiguous() for t in operands)
    out = torch.empty(shape, dtype=BF16)
    assert dequantize_triton.KERNEL.refuses(Dequantize(operands, FORMATS[name], out)) == ""


@pytest.mark.parametrize("case", [case for case in GPU_LAYOUTS if case != "tiles, padded"])
def test_int4_of_gpus_with_an_adapter(case: str, int4_product: None) -> None:
    """Their products have no gradient in eager mode; here they have."""
    weight, exact = GPU_LAYOUTS[case]()
    n, k = exact.shape
    layer = nn.Linear(k, n, bias=False, dtype=BF16)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    module, x = Adapted(layer, n, k), inputs(k=k)
    with no_codegen():
        result = compile_step(module, x, fullgraph=True)
    assert result.applied["extend_k"] == 1
    dense = nn.Linear(k, n, bias=False).double()
    dense.weight = nn.Parameter(exact, requires_grad=False)
    output, gradients = step(Adapted(dense, n, k).double(), inputs(torch.float64, k))
    assert testing.relative_error(result.output, output) < 2**-7
    assert testing.relative_error(result.gradients["x0"], gradients["x0"]) < 2**-7


@pytest.fixture
def int4_product() -> Iterator[None]:
    """The op that `Int4Tensor` calls, of a package for GPUs alone; Dynamo asks for its shape."""
    with torch.library._scoped_library("mslk", "FRAGMENT") as library:
        if not hasattr(torch.ops.mslk, "bf16i4bf16_rowwise"):
            library.define("bf16i4bf16_rowwise(Tensor x, Tensor w, Tensor s, Tensor z) -> Tensor")
            library.impl(
                "bf16i4bf16_rowwise", lambda x, w, s, z: x.new_empty(x.shape[0], w.shape[0]), "Meta"
            )
        yield


# --- in a graph -----------------------------------------------------------------------------------


def inputs(dtype: torch.dtype = BF16, k: int = K) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, 8, k, generator=generator).to(dtype).requires_grad_()


def compile_and_step(layer: nn.Module, **options: Any) -> Compiled:
    module = Adapted(layer)
    with no_codegen():
        return compile_step(module, inputs(), options=options, fullgraph=True)


def in_float64(layer: Any) -> Adapted:
    """The layer with torchao's own values in a dense weight."""
    dense = nn.Linear(K, N, bias=layer.bias is not None)
    dense.weight = nn.Parameter(layer.weight.dequantize().double(), requires_grad=False)
    if layer.bias is not None:
        dense.bias = nn.Parameter(layer.bias.double(), requires_grad=False)
    return Adapted(dense).double()


def wide_values(forward: fx.Graph, backward: fx.Graph) -> list[Tensor]:
    """What passes from forward to backward of the size of the weight, in 16 bits or more."""
    nodes = [*forward.output_node().all_input_nodes, *backward.find_nodes(op="placeholder")]
    kept = [node.meta["val"] for node in nodes]
    wide = [v for v in kept if isinstance(v, Tensor) and v.numel() >= N * K]
    return [v for v in wide if v.is_floating_point() and v.dtype.itemsize > 1]


@pytest.mark.parametrize("case", CONFIGS)
def test_a_layer_with_an_adapter(case: str) -> None:
    """Two decodes, the weight not saved, gradients of the adapter alone, as near as eager's."""
    config, name = CONFIGS[case]
    layer = linear(config, bias=case.endswith("row"))
    module = Adapted(layer)
    eager, expected = step(module, inputs(), module=module)
    exact, reference = step(in_float64(layer), inputs(torch.float64))
    found: dict[str, Any] = {}

    def run(compiled: Any) -> None:
        found["output"], found["gradients"] = step(compiled, inputs(), module=module)

    forward, backward = partition(run, module)
    output, gradients = found["output"], found["gradients"]
    assert gradients.keys() == expected.keys() == {"x0", "a", "b"}
    for graph in (forward, backward):
        (decode,) = graph.find_nodes(op="call_function", target=DEQUANTIZE)
        assert decode.args[1] == name
    assert not wide_values(forward, backward)
    report = inductor_q.last_report()
    assert report is not None
    assert report.applied()["canonicalize"] == report.applied()["extend_k"] == 1
    assert [v.status for v in report.verdicts().values()] == ["fused"]
    bound = 1.25 * testing.relative_error(eager, exact)
    assert testing.relative_error(output, exact) <= bound < 0.02
    bound = 1.25 * testing.relative_error(expected["x0"], reference["x0"])
    assert testing.relative_error(gradients["x0"], reference["x0"]) <= bound < 0.02


@pytest.mark.parametrize("case", ["int8 row", "nvfp4"])
def test_compiled_to_code(case: str) -> None:
    layer = linear(CONFIGS[case][0])
    result = compile_step(Adapted(layer), inputs(), fullgraph=True)
    exact, reference = step(in_float64(layer), inputs(torch.float64))
    assert testing.relative_error(result.output, exact) < 2**-7
    assert testing.relative_error(result.gradients["x0"], reference["x0"]) < 2**-7


def test_a_checkpointed_segment() -> None:
    layer = linear(CONFIGS["float8 row"][0])
    module = Adapted(layer)

    def run(x: Tensor) -> Tensor:
        out: Tensor = checkpoint(module, x, use_reentrant=False)
        return out

    with no_codegen():
        result = compile_step(run, inputs(), module=module, fullgraph=True)
    assert result.applied["unwrap_weights"] == 1
    assert result.ops["qfuse.dequantize"]
    _, expected = step(run, inputs(), module=module)
    for name, gradient in expected.items():
        assert testing.relative_error(result.gradients[name], gradient) < 2**-6, name


class Regions(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        def one(x: Tensor) -> Tensor:
            return torch.tanh(self.layer(x))

        region: Any = torch.compiler.nested_compile_region(one)
        out: Tensor = region(x) + region(2 * x)
        return out


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 fails before any backend runs")
def test_a_nested_compile_region() -> None:
    """Torch itself fails there before 2.15. Since then it computes what the layer does."""
    module, x = Regions(linear(CONFIGS["float8 row"][0])), inputs()
    stage = CapturedStage("unwrap_weights")
    torch._dynamo.reset()
    try:
        found = torch.compile(module, backend=stage)(x)
    except NotImplementedError as error:
        assert torch.__version__ < "2.15" and "HOP invoke_subgraph and subclass" in str(error)
    else:
        assert torch.__version__ >= "2.15"
        assert testing.relative_error(found, module(x).double()) < 2**-6
    assert [site.rejected for site in stage.sites] == [IN_REGION] * 2


def test_a_method_that_decodes() -> None:
    layer = linear(CONFIGS["float8 row"][0])
    x = inputs()
    with no_codegen():
        result = compile_step(lambda x: F.linear(x, layer.weight.dequantize()), x, fullgraph=True)
    assert result.applied["unwrap_weights"] == result.applied["canonicalize"] == 1
    assert testing.relative_error(result.output, layer(x)) < 2**-8


def test_strict_numerics_leave_a_product_that_scales_its_result() -> None:
    result = compile_and_step(linear(CONFIGS["int8 row"][0]), **{"qfuse.numerics": "strict"})
    (reason,) = result.reasons["unwrap_weights"]
    assert reason == f"{torchao.ROUNDS}: numerics strict leaves it so"
    grouped = compile_and_step(linear(CONFIGS["int8 group"][0]), **{"qfuse.numerics": "strict"})
    assert grouped.applied["unwrap_weights"] == 1


@pytest.mark.parametrize("case", ["int8 row", "int8 group"])
def test_an_input_of_another_dtype(case: str) -> None:
    """torchao casts 8-bit codes to the dtype of the input."""
    layer = linear(CONFIGS[case][0])
    x = inputs(torch.float32)
    expected = layer(x)
    with no_codegen():
        result = compile_step(lambda x: layer(x), x, fullgraph=True)
    assert result.output.dtype is expected.dtype is torch.float32
    assert result.applied["unwrap_weights"] == 1
    assert testing.relative_error(result.output, expected) < 2**-8


def test_a_weight_that_trains_or_is_looked_up() -> None:
    layer = linear(CONFIGS["intx4 row"][0])
    weight = nn.Parameter(layer.weight.detach(), requires_grad=True)
    with no_codegen():
        looked_up = compile_step(lambda i: F.embedding(i, layer.weight), torch.arange(4))
        trained = compile_step(lambda x: F.linear(x, weight), inputs())
    assert looked_up.reasons["unwrap_weights"] == {NO_PRODUCT.format("embedding"): 1}
    assert trained.reasons["unwrap_weights"] == {TRAINS: 1}


# --- whole models ---------------------------------------------------------------------------------

peft: Any = pytest.importorskip("peft")
transformers: Any = pytest.importorskip("transformers")


def train(model: Any, run: Any, steps: int = 3) -> tuple[list[float], Tensor]:
    """Return the losses of some steps, and the first step's gradients."""
    parameters = testing.adapter_parameters(model)
    optimizer = torch.optim.SGD(parameters, lr=0.3)
    batch = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))
    losses, gradients = [], []
    for _ in range(steps):
        loss = run(input_ids=batch, labels=batch).loss
        losses.append(loss.item())
        loss.backward()
        assert all(p.grad is not None for p in parameters)
        grads = [p.grad.double().flatten() for p in parameters if p.grad is not None]
        gradients.append(torch.cat(grads))
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients[0]


def adapted(base: Any) -> Any:
    config = peft.LoraConfig(
        r=8,
        target_modules=list(testing.PROJECTIONS),
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )
    torch.manual_seed(1)
    return peft.get_peft_model(base, config, autocast_adapter_dtype=False).train()


@pytest.mark.parametrize("case", ["int8 row", "float8 row", "nvfp4"])
@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated")
def test_three_steps_of_a_llama(case: str) -> None:
    config = testing.tiny_llama_config(num_hidden_layers=1)
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16)

    def is_projection(module: nn.Module, path: str) -> bool:
        return path.endswith(testing.PROJECTIONS)

    quantize_(base, CONFIGS[case][0], filter_fn=is_projection)
    model = adapted(base)
    trained = len(testing.adapter_parameters(model))
    assert trained == 2 * len(testing.PROJECTIONS)
    start = copy.deepcopy(testing.adapter_state(model))
    losses, gradients = train(model, model)
    testing.load_adapter_state(model, start)
    torch._dynamo.reset()
    with no_codegen():
        found, compiled = train(model, torch.compile(model, backend="qfuse", fullgraph=True))
    report = inductor_q.last_report()
    assert report is not None
    judged = {path: verdict.status for path, verdict in report.verdicts().items()}
    assert len(judged) == len(testing.PROJECTIONS)
    assert set(judged.values()) == {"fused"}
    assert testing.relative_error(compiled, gradients) < 0.05
    learned = losses[0] - losses[-1]
    assert max(abs(a - b) for a, b in zip(found, losses, strict=True)) < 0.1 * learned


def test_a_checkpoint_that_transformers_quantizes(tmp_path: Path) -> None:
    """`TorchAoConfig`, and PEFT's own layers for it."""
    config = testing.tiny_llama_config(num_hidden_layers=1)
    transformers.AutoModelForCausalLM.from_config(config, dtype=BF16).save_pretrained(tmp_path)
    asked = transformers.TorchAoConfig(quantized("Int8WeightOnlyConfig"))
    base = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=BF16, quantization_config=asked
    )
    model = adapted(base)
    layer = model.base_model.model.model.layers[0].mlp
    assert type(layer.up_proj).__name__ == "TorchaoLoraLinear"
    x = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(0)).to(BF16)
    with no_codegen():
        result = compile_step(layer, x.requires_grad_(), fullgraph=True)
    assert result.applied["canonicalize"] == result.applied["unwrap_weights"] == 3
    expected, _ = step(layer, x, module=layer)
    assert testing.relative_error(result.output, expected) < 2**-6
