"""No dequantized weight is kept for backward: of bitsandbytes 4-bit and 8-bit, and of torchao."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import inductor_q
from inductor_q import testing
from inductor_q.backend import qfuse
from inductor_q.passes.keep_packed import NESTED, WRITTEN
from tests.support.compiling import (
    SMALL,
    compile_step,
    gradients,
    no_codegen,
    skip_unless_regions_chain,
    step,
)
from tests.support.packed import Gptq

BF16 = torch.bfloat16
N, K, R, M = 256, 192, 8, 16  # N * K is larger than any activation
#: Layers of few rows are decoded, too, also where a kernel reads their packed weights.
DECODED = {
    **SMALL,
    "qfuse.thresholds": {**SMALL["qfuse.thresholds"], "linear_rows.max_rows": 0},
}


class WithAdapter(nn.Module):
    """A frozen quantized layer, its input and a LoRA beside it that need gradients."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.base = base
        self.a = nn.Parameter((torch.randn(R, K, generator=generator) * K**-0.5).to(BF16))
        self.b = nn.Parameter((torch.randn(N, R, generator=generator) * R**-0.5).to(BF16))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        return torch.tanh(self.base(x) + x @ self.a.t() @ self.b.t())


def dense() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(K, N, bias=False, dtype=BF16).requires_grad_(False)


def bnb_4bit(**quantization: Any) -> nn.Module:
    pytest.importorskip("bitsandbytes")
    linear: nn.Module = testing.quantized_linear(dense().weight, **quantization)
    return linear


def bnb_8bit() -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    linear = bnb.nn.Linear8bitLt(K, N, bias=False, has_fp16_weights=False, threshold=0.0)
    linear.load_state_dict({"weight": dense().weight.data})
    module: nn.Module = linear.to("cpu")
    module(torch.randn(2, K).to(BF16))  # quantizes in its first call
    assert module.state_dict()["weight"].dtype is torch.int8
    return module


def torchao_int8() -> nn.Module:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = nn.Sequential(dense())
    quantize_(model, Int8WeightOnlyConfig(set_inductor_config=False))
    assert type(model[0].weight) is not nn.Parameter
    return model.requires_grad_(False)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "bitsandbytes nf4": bnb_4bit,
    "bitsandbytes fp4, one level of scales": lambda: bnb_4bit(quant_type="fp4", nested=False),
    "bitsandbytes int8": bnb_8bit,
    "torchao int8": torchao_int8,
}
#: Built on a CPU and moved, as a model is. bitsandbytes' int8 runs other code on a GPU, which keeps
#: nothing itself.
BNB_4BIT = ("bitsandbytes nf4", "bitsandbytes fp4, one level of scales")
ON_GPU = [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in BNB_4BIT]
ON_DEVICES = pytest.mark.parametrize("name, device", [*((name, "cpu") for name in LAYERS), *ON_GPU])


def saved(
    fn: Callable[[Tensor], Tensor], x: Tensor, least: int = N * K
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Floating tensors of at least that many elements that a forward keeps."""
    found = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.numel() >= least and tensor.dtype.itemsize > 1:
            found.append((tuple(tensor.shape), tensor.dtype))
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fn(x)
    return found


def x_MK(device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(M, K, generator=generator).to(device, BF16).requires_grad_()


def compiled_and_warm(module: nn.Module, x: Tensor, backend: Any, **kwargs: Any) -> Any:
    """Compiled, forward and backward: hooks while Dynamo traces would become part of the graph."""
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=backend, **kwargs)
    compiled(x).sum().backward()
    gradients({"x": x}, module)
    return compiled


@ON_DEVICES
def test_no_weight_is_saved(name: str, device: str) -> None:
    module, x = WithAdapter(LAYERS[name]()).to(device), x_MK(device)
    assert saved(compiled_and_warm(module, x, qfuse, options=SMALL), x) == []


@pytest.mark.parametrize("name", ["bitsandbytes int8", "torchao int8"])
def test_stock_inductor_saves_it(name: str) -> None:
    """What the pass is for. It can go when torch recomputes these by itself."""
    module, x = WithAdapter(LAYERS[name]()), x_MK()
    compiled = compiled_and_warm(module, x, "inductor")
    assert [dtype for _, dtype in saved(compiled, x)] == [BF16]


@pytest.mark.parametrize(
    "name, device", [("bitsandbytes nf4", "cpu"), ("torchao int8", "cpu"), *ON_GPU[:1]]
)
def test_it_is_saved_without_the_pass(name: str, device: str) -> None:
    module, x = WithAdapter(LAYERS[name]()).to(device), x_MK(device)
    options = {**DECODED, "qfuse.passes": {"keep_packed": False}}
    assert [d for _, d in saved(compiled_and_warm(module, x, qfuse, options=options), x)] == [BF16]


@ON_DEVICES
def test_values_and_report(name: str, device: str) -> None:
    module, x = WithAdapter(LAYERS[name]()).to(device), x_MK(device)
    output, expected = step(module, x, module=module)
    result = compile_step(module, x)
    assert testing.relative_error(result.output, output) < 2**-6
    assert result.gradients.keys() == expected.keys()
    for key, grad in expected.items():
        assert testing.relative_error(result.gradients[key], grad) < 2**-5, key
    assert result.applied["keep_packed"] == 1
    assert result.report.bytes_saved == N * K * 2
    # Nor does it pass from the forward graph to the backward graph.
    forward, backward = result.partitioned
    for graph in (forward.output_node().all_input_nodes, backward.find_nodes(op="placeholder")):
        values = [node.meta["val"] for node in graph]
        wide = [v for v in values if isinstance(v, Tensor) and v.numel() >= N * K]
        assert not [v for v in wide if v.is_floating_point() and v.dtype.itemsize > 1]


class Batched(nn.Module):
    """A weight that a batched product reads: decoded once, and repeated as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.base: Any = bnb_4bit()

    def forward(self, x: Tensor) -> Tensor:
        decode = pytest.importorskip("bitsandbytes").functional.dequantize_4bit
        weight = decode(self.base.weight.data, self.base.weight.quant_state).to(BF16).t()
        x = torch.tanh(x).reshape(4, M // 4, K)
        return torch.tanh(torch.bmm(x, weight.unsqueeze(0).expand(4, -1, -1)))


def test_a_view_of_a_weight_is_not_what_would_be_saved() -> None:
    with no_codegen():
        result = compile_step(Batched(), x_MK())
    assert result.applied["keep_packed"] == 1
    assert result.report.bytes_saved == N * K * 2


def test_a_weight_that_trains_is_no_ones_business() -> None:
    """Only what is computed from frozen packed inputs is recomputed."""
    module = nn.Sequential(dense().requires_grad_(), WithAdapter(bnb_4bit()))
    module[0] = nn.Linear(K, K, bias=False, dtype=BF16)
    result = compile_step(module, x_MK())
    assert result.applied["keep_packed"] == 1
    assert "0.weight" in result.gradients


def test_saved_bytes_of_a_llama_are_those_of_its_activations(device: str) -> None:
    pytest.importorskip("transformers")
    model = testing.qlora_model(
        testing.tiny_llama_config(num_hidden_layers=1, hidden_size=256, intermediate_size=512),
        adapter_dtype=BF16,
        device=device,
    )
    tokens = torch.randint(0, 256, (1, 8)).to(device)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend=qfuse, options=SMALL)

    def forward() -> Any:
        return compiled(input_ids=tokens, labels=tokens).loss

    with no_codegen():
        forward().backward()
    kept = testing.count_saved_bytes(forward, model)
    smallest = 2 * 16 * 256 * 2  # k_proj in bf16
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in kept.tensors]
    large = [s for s, n in zip(kept.tensors, sizes, strict=True) if n >= smallest]
    assert not [s for s in large if s[0][0] != 1 and 8 not in s[0]], large


class Rotating(nn.Module):
    """An int8 weight that every forward exchanges for another one after using it."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        codes = torch.randint(-100, 100, (N, K), dtype=torch.int8, generator=generator)
        self.register_buffer("weight", codes)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(torch.tanh(x) @ (self.weight.to(BF16) * 0.01).t())
        self.weight.copy_(self.weight.flip(0))
        return y


def test_a_weight_that_forward_writes_to_is_saved_as_it_was() -> None:
    _, expected = step(Rotating(), x_MK())
    result = compile_step(Rotating(), x_MK())
    assert testing.relative_error(result.gradients["x0"], expected["x0"]) < 2**-5
    assert "keep_packed" not in result.applied
    assert result.reasons["keep_packed"] == {WRITTEN: 1}


class Mixed(nn.Module):
    """A quantized layer, and bytes that are no weight: what a program mixes features with."""

    mixing: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = WithAdapter(bnb_4bit())
        generator = torch.Generator().manual_seed(0)
        mixing = torch.randint(-1, 2, (N, N), dtype=torch.int8, generator=generator)
        self.register_buffer("mixing", mixing)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) @ self.mixing.to(BF16)
        return y


def test_bytes_that_are_no_weight_may_change_before_backward() -> None:
    """A backward that computes from them again would find them changed, which torch refuses."""
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        module, x = Mixed(), x_MK()
        run: Any = torch.compile(module, backend=qfuse, options=SMALL) if compiled else module
        with no_codegen():
            y = run(x)
            module.mixing.zero_()
            y.float().square().sum().backward()
        results.append(gradients({"x": x}, module))
    expected, found = results
    assert found.keys() == expected.keys() and expected["x"].any()
    for name, grad in expected.items():
        assert testing.relative_error(found[name], grad) < 2**-5, name
    report = inductor_q.last_report()
    assert report is not None
    assert [s.module for s in report.sites if s.pass_name == "keep_packed"] == ["layer.base"]


class GptqLayer(Gptq):
    """GPTQ's decode without an order of rows: scales and zero points, repeated, have its size."""

    wf: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("wf", torch.arange(0, 32, 4, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        codes = (self.qweight[:, None] >> self.wf[:, None]).bitwise_and(15).reshape(64, 64)
        zeros = (self.qzeros[:, :, None] >> self.wf).bitwise_and(15).reshape(2, 64)
        zeros, scales = (
            torch.cat([row.expand(32, 64) for row in rows]) for rows in (zeros, self.scales)
        )
        return torch.tanh(torch.tanh(x) @ ((codes - zeros).to(x.dtype) * scales))


def test_what_helps_to_decode_is_not_saved_either() -> None:
    module, x = GptqLayer(), x_MK()[:, :64].detach().requires_grad_()
    with no_codegen():
        assert saved(compiled_and_warm(module, x, qfuse, options=SMALL), x, 64 * 64) == []
    report = inductor_q.last_report()
    assert report is not None and report.applied()["keep_packed"] == 1
    assert report.bytes_saved == 64 * 64 * 2


# --- nested compile regions -----------------------------------------------------------------------


class Region(nn.Module):
    """A layer that torch compiles once, however often it stands in a model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Codes(nn.Module):
    """A weight that a library of its own decodes from int8."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-100, 100, (N, N), dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(BF16) * 0.01).t()


def regions(layer: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(Region(layer()), Region(layer()))


def bnb_square() -> nn.Module:
    weight = nn.Linear(N, N, bias=False, dtype=BF16).weight.data
    linear: nn.Module = testing.quantized_linear(weight)
    return linear


def x_MN() -> Tensor:
    return torch.randn(M, N, generator=torch.Generator().manual_seed(3)).to(BF16).requires_grad_()


def test_no_weight_is_saved_by_a_nested_region() -> None:
    module, x = regions(bnb_square), x_MN()
    skip_unless_regions_chain(module, x)
    output, expected = step(module, x)
    result = compile_step(module, x, options=DECODED)
    assert testing.relative_error(result.output, output) < 2**-6
    assert testing.relative_error(result.gradients["x0"], expected["x0"]) < 2**-5
    assert result.applied["keep_packed"] == 1, "one graph"
    assert result.report.bytes_saved == 2 * N * N * 2, "for two layers"
    [site] = [s for s in result.report.sites if s.pass_name == "keep_packed"]
    assert (site.module, site.also) == ("0.layer", ("1.layer",))
    assert saved(compiled_and_warm(module, x, qfuse, options=DECODED), x) == []
    without = {**DECODED, "qfuse.passes": {"keep_packed": False}}
    kept = saved(compiled_and_warm(module, x, qfuse, options=without), x)
    assert kept == [((N, N), BF16)] * 2


def test_what_a_nested_region_keeps_is_told() -> None:
    """Not ours to recompute: torch does not say there that the int8 input is a weight."""
    module, x = regions(Codes), x_MN()
    skip_unless_regions_chain(module, x)
    options = {**SMALL, "qfuse.passes": ["keep_packed"]}
    result = compile_step(module, x, options=options)
    assert "keep_packed" not in result.applied
    assert result.reasons["keep_packed"] == {NESTED: 1}
    [site] = result.report.sites
    assert (site.module, site.also) == ("0.layer", ("1.layer",))
    assert saved(compiled_and_warm(module, x, qfuse, options=options), x) == [((N, N), BF16)] * 2
