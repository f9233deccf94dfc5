"""Every pass on graphs of real bitsandbytes and PEFT layers: what matched, what was refused and
why, what the graph is made of afterwards, and that the values are still those of eager."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inductor_q import ops, testing
from inductor_q.capture.bnb_state import bnb_operands
from inductor_q.exc import NotFused
from inductor_q.passes import PIPELINE
from inductor_q.passes.canonicalize import LEAVES
from inductor_q.passes.fuse_dropout import EAGER
from tests.support.compiling import Between, Compiled, compile_step, step
from tests.support.processes import ROOT, environment

bnb = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

OLD_BNB = Path(os.environ.get("INDUCTOR_Q_BNB049") or Path(sys.prefix) / "bnb049")

BF16, FP32 = torch.bfloat16, torch.float32
N, K = 128, 64

STRICT = "qfuse.numerics='strict' keeps every product as written"
FLOAT32 = (
    "float32 adapter on a 16-bit activation: its products stay float32 "
    "(autocast, 16-bit adapters or qfuse.numerics='relaxed' let them join the main product)"
)


# --- layers -------------------------------------------------------------------------------------


def linear(n: int = N, k: int = K, *, bias: bool = False, **quantization: Any) -> Any:
    generator = torch.Generator().manual_seed(11)
    weight = (torch.randn(n, k, generator=generator) * k**-0.5).to(BF16)
    offset = torch.randn(n, generator=generator).to(BF16) if bias else None
    return testing.quantized_linear(weight, offset, **quantization)


def lora(adapter_dtype: torch.dtype = BF16, **settings: Any) -> nn.Module:
    return testing.lora_linear(N, K, adapter_dtype=adapter_dtype, **settings)


def peft_adapters(*configs: Any) -> nn.Module:
    """A quantized layer under one active bf16 adapter for each config."""
    model: Any = nn.Module()
    model.proj = linear()
    model.is_loaded_in_4bit = True
    for i, config in enumerate(configs):
        with pytest.warns() if i else contextlib.nullcontext():
            peft.inject_adapter_in_model(config, model, adapter_name=f"adapter_{i}")
    model.proj.set_adapter([f"adapter_{i}" for i in range(len(configs))])
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.proj.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            noise = torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5
            parameter.data = noise.to(BF16)
    proj: nn.Module = model.proj
    return proj.train()


def config(r: int, alpha: float, **settings: Any) -> Any:
    return peft.LoraConfig(r=r, lora_alpha=alpha, target_modules=["proj"], **settings)


class ByHand(nn.Module):
    """LoRA without PEFT, next to a Linear4bit."""

    def __init__(self, scaling: float | None = None, r: int = 8) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(13)
        self.base = linear()
        self.a = nn.Parameter((torch.randn(r, K, generator=generator) * K**-0.5).to(BF16))
        self.b = nn.Parameter((torch.randn(N, r, generator=generator) * r**-0.5).to(BF16))
        self.scaling = scaling

    def forward(self, x: Tensor) -> Tensor:
        low = x @ self.a.t() @ self.b.t()
        y: Tensor = self.base(x) + (low if self.scaling is None else low * self.scaling)
        return y


class ByOp(ByHand):
    """The qfuse:: ops, used directly."""

    def __init__(self, verb: str) -> None:
        super().__init__()
        self.verb = verb
        weight = self.base.weight
        self.operands, self.format, self.shape = bnb_operands(weight, weight.quant_state)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.operands, self.format, self.shape
        if self.verb == "dequantize":
            return x @ ops.dequantize(*packed, x.dtype).t()
        if self.verb == "linear":
            return ops.linear(x, *packed)
        return ops.lora_linear(x, *packed, [self.a], [self.b], [2.0])


class Shared(nn.Module):
    """Three layers with adapters over one input, as q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ByHand(2.0) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x) for layer in self.layers)
        return torch.tanh(q) + torch.sin(k) + torch.cos(v)


class SharedPlain(nn.Module):
    """Two layers without adapters over one input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.gate(x)) * self.up(x)
        return y


class Float32(nn.Module):
    """Three layers over one float32 input, which each casts on its own; their sums are float32.

    PEFT casts the adapter's term under autocast of a CPU, and leaves it to the addition on a GPU.
    """

    def __init__(self, *, widened: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ByHand() for _ in range(3)])
        for layer in self.layers if bias else ():
            layer.base = linear(bias=True)
        self.widened = widened

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x.float())
        q, k, v = (self.one(layer, x) for layer in self.layers)
        return torch.tanh(q) + torch.sin(k) + torch.cos(v)

    def one(self, layer: Any, x: Tensor) -> Tensor:
        low = x.to(BF16) @ layer.a.t() @ layer.b.t() * 2.0
        y: Tensor = layer.base(x) + (low.float() if self.widened else low)
        return y


# --- what each case becomes ---------------------------------------------------------------------


@dataclass
class Case:
    build: Callable[[], nn.Module]
    applied: Mapping[str, int]
    ops: Mapping[str, int]
    reasons: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    autocast: bool = False
    on_gpu: Mapping[str, int] = field(default_factory=dict)  # what is applied otherwise there

    def context(self, device: str) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(device, dtype=BF16) if self.autocast else contextlib.nullcontext()


TANGENTS = "the input comes from tangents_1, which cannot write into a wider buffer"
ADAPTER = {"canonicalize": 2, "fold_lora": 4, "extend_k": 2, "keep_packed": 1, "read_gradients": 1}
# Two wide products (forward, backward), dA and dB; the projections are inside qfuse::extend.
EXTENDED = {"mm": 4, "qfuse.dequantize": 2, "qfuse.extend": 2, "cat": 2}
# Three products forward, five backward.
SEPARATE = {"mm": 8, "qfuse.dequantize": 2, "qfuse.extend": 0, "cat": 0}
BASE_ONLY = {"mm": 2, "qfuse.dequantize": 2, "qfuse.extend": 0}
SHARED = {
    "canonicalize": 6,
    "fold_lora": 9,
    "stack_adapters": 1,
    "extend_k": 4,
    "stack_gradients": 1,
    "keep_packed": 3,
    "read_gradients": 1,
}
# Forward one product a layer, backward one for all; three dB and one dA.
SHARED_OPS = {"mm": 8, "qfuse.dequantize": 6, "qfuse.extend": 2}
FOR_SURE = {"fallback_random": True}  # eager's dropout masks
FACTOR = (
    "a factor that cannot move (a dropout mask, a scaling without fold_lora, or of few rows) "
    "stands inside the adapter"
)


def without(*names: str, of: Mapping[str, int] = ADAPTER) -> dict[str, int]:
    return {name: count for name, count in of.items() if name not in names}


CASES: dict[str, Case] = {
    "bf16 adapter": Case(lora, ADAPTER, EXTENDED),
    "fp32 adapter": Case(
        lambda: lora(FP32),
        {"canonicalize": 2, "fold_lora": 4, "keep_packed": 1},
        SEPARATE,
        reasons={"fold_lora": {FLOAT32: 6}, "extend_k": {FLOAT32: 2}},
    ),
    "fp32 adapter, relaxed": Case(
        lambda: lora(FP32),
        {**ADAPTER, "fold_lora": 10},
        EXTENDED,
        options={"qfuse.numerics": "relaxed"},
    ),
    "fp32 adapter, autocast": Case(
        lambda: lora(FP32),
        {**ADAPTER, "fold_lora": 6},
        EXTENDED,
        autocast=True,
        # PEFT asks for the autocast of CUDA before it casts the input to float32 and, so, back.
        on_gpu={"fold_lora": 4},
    ),
    "bf16 adapter, strict": Case(
        lora,
        {"canonicalize": 2, "fold_lora": 1, "keep_packed": 1},
        SEPARATE,
        reasons={
            "fold_lora": {STRICT: 3},
            "extend_k": {FACTOR: 1, STRICT: 1},
            "read_gradients": {STRICT: 1},
        },
        options={"qfuse.numerics": "strict"},
    ),
    "dropout": Case(
        lambda: lora(dropout=0.1),
        {**ADAPTER, "extend_k": 1, "read_gradients": 1},
        {"mm": 6, "qfuse.dequantize": 2, "qfuse.extend": 1},
        reasons={"fuse_dropout": {EAGER: 1}, "extend_k": {FACTOR: 1}},
        options=FOR_SURE,
    ),
    "fp32 adapter, dropout": Case(
        lambda: lora(FP32, dropout=0.1),
        {"canonicalize": 2, "fold_lora": 4, "keep_packed": 1},
        SEPARATE,
        reasons={
            "fuse_dropout": {EAGER: 1},
            "fold_lora": {FLOAT32: 4},
            "extend_k": {FLOAT32: 2},
        },
        options=FOR_SURE,
    ),
    "two adapters": Case(
        lambda: peft_adapters(config(16, 32), config(8, 24)),
        {**without("read_gradients"), "fold_lora": 7, "stack_adapters": 2, "stack_gradients": 1},
        {"mm": 5, "qfuse.dequantize": 2, "qfuse.extend": 2},
    ),
    "rslora": Case(lambda: peft_adapters(config(8, 16, use_rslora=True)), ADAPTER, EXTENDED),
    "bias": Case(lambda: lora(bias=True), ADAPTER, EXTENDED),
    "fp4, one level of scales": Case(
        lambda: lora(quant_type="fp4", nested=False, blocksize=32), ADAPTER, EXTENDED
    ),
    "stored as bf16": Case(lambda: lora(quant_storage=BF16), ADAPTER, EXTENDED),
    "stored as fp16": Case(lambda: lora(quant_storage=torch.float16), ADAPTER, EXTENDED),
    "stored as fp32": Case(lambda: lora(quant_storage=FP32), ADAPTER, EXTENDED),
    "by hand": Case(ByHand, without("fold_lora"), EXTENDED),
    "by hand, scaled": Case(lambda: ByHand(0.5), {**ADAPTER, "fold_lora": 3}, EXTENDED),
    "no adapter": Case(linear, {"canonicalize": 2, "keep_packed": 1}, BASE_ONLY),
    "no adapter, bias": Case(
        lambda: linear(bias=True), {"canonicalize": 2, "keep_packed": 1}, BASE_ONLY
    ),
    "qfuse::dequantize": Case(
        lambda: ByOp("dequantize"),
        {"canonicalize": 1, "keep_packed": 1},
        {"mm": 2, "qfuse.dequantize": 1},
    ),
    "qfuse::linear": Case(lambda: ByOp("linear"), {"canonicalize": 2, "keep_packed": 1}, BASE_ONLY),
    "qfuse::lora_linear": Case(
        lambda: ByOp("lora_linear"),
        {**ADAPTER, "fold_lora": 3, "stack_adapters": 1},
        EXTENDED,
    ),
    "three adapters over one input": Case(Shared, SHARED, SHARED_OPS),
    # Of six casts of the input five are merged, and one of two of each gradient.
    "float32 sums": Case(Float32, {**SHARED, "fold_lora": 17}, SHARED_OPS),
    "float32 sums of two dtypes": Case(
        lambda: Float32(widened=False), {**SHARED, "fold_lora": 17}, SHARED_OPS
    ),
    "float32 sums, bias": Case(lambda: Float32(bias=True), {**SHARED, "fold_lora": 17}, SHARED_OPS),
    "float32 sums, strict": Case(
        Float32,
        without("extend_k", "read_gradients", of=SHARED) | {"fold_lora": 8},
        {"mm": 20, "qfuse.dequantize": 6, "qfuse.extend": 0},
        reasons={
            "fold_lora": {STRICT: 9},
            "extend_k": {FACTOR: 3, STRICT: 1},
            "read_gradients": {STRICT: 3},
        },
        options={"qfuse.numerics": "strict"},
    ),
    "two plain layers over one input": Case(
        SharedPlain,
        {"canonicalize": 4, "keep_packed": 2},
        {"mm": 4, "qfuse.dequantize": 4},
    ),
}
#: What also runs on a GPU: each pass, each dtype, a bias. Not dropout, whose masks on a GPU go with
#: the layout of what they are drawn for.
ON_GPU = (
    "bf16 adapter",
    "fp32 adapter",
    "fp32 adapter, relaxed",
    "fp32 adapter, autocast",
    "two adapters",
    "bias",
    "fp4, one level of scales",
    "stored as bf16",
    "three adapters over one input",
)
CLOSE = 0.015  # a few roundings to bf16 (2**-9 each) between the reordered sums


def x_MK(*, dtype: torch.dtype = BF16, seed: int = 3, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 48, K, generator=generator).to(device, dtype).requires_grad_()


def eager(
    module: nn.Module, x: Tensor, context: contextlib.AbstractContextManager[Any] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    with context or contextlib.nullcontext():
        return step(module, x, module=module)


def compiled(module: nn.Module, x: Tensor, **kwargs: Any) -> Compiled:
    torch.manual_seed(0)
    return compile_step(module, x, **kwargs)


def assert_same(result: Compiled, expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    output, grads = expected
    assert result.output.shape == output.shape and result.output.dtype == output.dtype
    assert testing.relative_error(result.output, output) < CLOSE
    assert result.gradients.keys() == grads.keys()
    for name, grad in grads.items():
        assert result.gradients[name].dtype == grad.dtype
        assert testing.relative_error(result.gradients[name], grad) < CLOSE, name


@pytest.mark.usefixtures("graph_or_code")
@pytest.mark.parametrize(
    "name, device",
    [(name, "cpu") for name in CASES]
    + [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in ON_GPU],
)
def test_match_counts(name: str, device: str) -> None:
    case = CASES[name]
    module, x = Between(case.build()).to(device), x_MK(device=device)
    expected = eager(module, x, case.context(device))
    result = compiled(module, x, options=case.options, context=case.context(device))
    assert result.applied == {**case.applied, **(case.on_gpu if device == "cuda" else {})}
    assert result.reasons == case.reasons
    assert {op: result.ops[op] for op in case.ops} == case.ops
    assert not [op for op in result.ops if op.startswith("bitsandbytes")]
    assert_same(result, expected)


@pytest.mark.parametrize("storage", [BF16, torch.float16, FP32])
def test_the_storage_dtype_changes_no_value(storage: torch.dtype) -> None:
    """The same bytes, seen as another dtype: bitwise what uint8 gives, forward and backward."""
    plain, stored = (
        compiled(Between(lora(quant_storage=s)), x_MK()) for s in (torch.uint8, storage)
    )
    assert torch.equal(stored.output, plain.output)
    assert stored.gradients.keys() == plain.gradients.keys()
    for name, grad in plain.gradients.items():
        assert torch.equal(stored.gradients[name], grad), name
    assert stored.report.bytes_saved == plain.report.bytes_saved == N * K * 2


@pytest.mark.slow
@pytest.mark.skipif(
    not (OLD_BNB / "bitsandbytes").is_dir(),
    reason=f"no bitsandbytes 0.49 in {OLD_BNB}: `make test` puts one there",
)
def test_match_counts_of_the_previous_bitsandbytes() -> None:
    """The same counts, pinned above, for the graphs of 0.49."""
    chosen = "test_match_counts and (adapter or bias or hand) and not previous or of_this_version"
    command = [sys.executable, "-m", "pytest", "-q", "--show-capture=no", "-W", "ignore", __file__]
    result = subprocess.run(
        [*command, "-k", chosen],
        env=environment(OLD_BNB, ROOT, EXPECTED_BNB="0.49"),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-4000:]
    assert "15 passed" in result.stdout, result.stdout[-4000:]


def test_bitsandbytes_of_this_version_is_what_the_graphs_come_from() -> None:
    """0.50 has gemm_4bit, 0.49 does not: that both are covered is no accident of an install."""
    expected = os.environ.get("EXPECTED_BNB", "0.5")
    assert bnb.__version__.startswith(expected)
    assert hasattr(torch.ops.bitsandbytes, "gemm_4bit") == (expected != "0.49")


class MatMul4Bit049(torch.autograd.Function):
    """What bitsandbytes 0.49 traces to, on the ops of whatever version is installed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, state: Any, bias: Tensor | None) -> Tensor:
        ctx.state, ctx.weight, ctx.dtype = state, weight, x.dtype
        values = bnb.functional.dequantize_4bit(weight, state).to(x.dtype)
        return torch.nn.functional.linear(x, values, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        values = bnb.functional.dequantize_4bit(ctx.weight, ctx.state).to(grad.dtype)
        return torch.matmul(grad, values), None, None, None


class Linear049(nn.Module):
    def __init__(self, nested: bool, bias: bool) -> None:
        super().__init__()
        self.base = linear(nested=nested, bias=bias)
        generator = torch.Generator().manual_seed(13)
        self.a = nn.Parameter((torch.randn(8, K, generator=generator) * K**-0.5).to(BF16))
        self.b = nn.Parameter((torch.randn(N, 8, generator=generator) * 8**-0.5).to(BF16))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.weight
        layer: Any = MatMul4Bit049
        y: Tensor = layer.apply(x, weight, weight.quant_state, self.base.bias)
        return y.clone() + (x @ self.a.t()) @ self.b.t() * 2.0


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_the_graph_of_bitsandbytes_0_49_on_any_version(nested: bool, bias: bool) -> None:
    module, x = Between(Linear049(nested, bias)), x_MK()
    expected = eager(module, x)
    result = compiled(module, x)
    assert result.applied == ADAPTER
    assert result.reasons == {}
    assert {op: result.ops[op] for op in EXTENDED} == EXTENDED
    assert not [op for op in result.ops if op.startswith("bitsandbytes")]
    assert_same(result, expected)


# --- what a user can change ---------------------------------------------------------------------


@pytest.mark.usefixtures("graph_or_code")
@pytest.mark.parametrize("name", [p.name for p in PIPELINE])
def test_a_disabled_pass_does_nothing_and_the_rest_stays_right(name: str) -> None:
    module, x = Between(Shared()), x_MK()
    expected = eager(module, x)
    result = compiled(module, x, options={"qfuse.passes": {name: False}})
    assert name not in {record.name for record in result.report.passes}
    assert name not in {site.pass_name for site in result.report.sites}
    assert_same(result, expected)


def test_without_passes_the_graph_is_as_bitsandbytes_wrote_it() -> None:
    module, x = Between(lora()), x_MK()
    expected = eager(module, x)
    result = compiled(module, x, options={"qfuse.passes": "none"})
    assert result.applied == {} and result.reasons == {}
    old = not hasattr(torch.ops.bitsandbytes, "gemm_4bit")
    assert result.ops["bitsandbytes.gemm_4bit"] == (0 if old else 1)
    assert result.ops["bitsandbytes.dequantize_4bit"] == (2 if old else 1)
    assert not [op for op in result.ops if op.startswith("qfuse")]
    assert_same(result, expected)


def test_order_of_the_passes_is_the_pipeline() -> None:
    result = compiled(Between(lora()), x_MK())
    ran = [record.name for record in result.report.passes]
    assert list(dict.fromkeys(ran)) == [p.name for p in PIPELINE]
    twice = [name for name in dict.fromkeys(ran) if ran.count(name) > 1]
    assert twice == ["project_in_place", "read_gradients", "cast_together", "widen_products"]


@pytest.mark.parametrize(
    ("numerics", "dtypes"),
    [
        ("strict", {BF16: 2, FP32: 6}),
        ("default", {BF16: 2, FP32: 6}),
        ("relaxed", {BF16: 4}),
    ],
)
def test_dtype_of_every_product_by_numerics(
    numerics: str, dtypes: Mapping[torch.dtype, int]
) -> None:
    """An fp32 adapter: its six products stay float32 unless numerics is relaxed."""
    result = compiled(Between(lora(FP32)), x_MK(), options={"qfuse.numerics": numerics})
    products = [
        node.meta["val"].dtype
        for node in result.joint[0].nodes
        if node.target is torch.ops.aten.mm.default
    ]
    assert {dtype: products.count(dtype) for dtype in set(products)} == dtypes


# --- why a site was refused ---------------------------------------------------------------------


def test_few_rows_are_refused_with_the_threshold_in_force() -> None:
    options = {"qfuse.thresholds": {"extend_k.min_rows": 97}}
    result = compiled(Between(lora()), x_MK(), options=options)
    reason = "96 rows, fewer than extend_k.min_rows=97 of the preset"
    assert result.reasons == {"extend_k": {reason: 2}}


def test_an_input_that_another_kernel_wrote_is_not_copied() -> None:
    """Without an activation around it, the gradient of the output comes from outside."""
    result = compiled(lora(), x_MK())
    assert result.applied["extend_k"] == 1
    assert result.reasons == {"extend_k": {TANGENTS: 1}}


def test_rows_below_which_the_kernel_of_bitsandbytes_is_kept() -> None:
    module = linear()
    x = torch.randn(1, K).to(BF16)
    if not hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        pytest.skip("bitsandbytes 0.49 has no gemm_4bit")
    options = {"qfuse.thresholds": {"canonicalize.min_rows": 2, "linear_rows.max_rows": 0}}
    result = compiled(module.requires_grad_(False), x, options=options)
    reason = (
        "1 rows, fewer than canonicalize.min_rows=2 of the preset: "
        "bitsandbytes' kernel reads packed weights and is faster here"
    )
    assert result.reasons == {"canonicalize": {reason: 1}}
    assert result.ops["bitsandbytes.gemm_4bit"] == 1


def test_sites_name_the_module_and_the_line() -> None:
    result = compiled(Between(lora()), x_MK())
    sites = result.report.sites
    quantized = [s for s in sites if s.pass_name in ("canonicalize", "extend_k", "keep_packed")]
    assert {s.module for s in quantized} == {"layer.proj"}
    lines, first = inspect.getsourcelines(Between.forward)
    assert "self.layer(" in lines[1]
    assert {s.source for s in quantized} == {f"{inspect.getfile(Between)}:{first + 1}"}
    assert not [s.module for s in sites if "L[" in s.module or "base_layer" in s.module]
    saved = next(s for s in sites if s.pass_name == "keep_packed")
    assert saved.bytes_saved == N * K * 2 == result.report.bytes_saved
    assert saved.shape == (N, K)


@pytest.mark.parametrize("order", ["adapter first", "base first"])
def test_the_order_of_the_sum_does_not_matter(order: str) -> None:
    class Sum(ByHand):
        def forward(self, x: Tensor) -> Tensor:
            low, base = x @ self.a.t() @ self.b.t(), self.base(x)
            y: Tensor = low + base if order == "adapter first" else base + low
            return y

    module, x = Between(Sum()), x_MK()
    expected = eager(module, x)
    result = compiled(module, x)
    assert result.applied["extend_k"] == 2
    assert_same(result, expected)


def test_a_product_that_is_no_adapter_is_left_alone() -> None:
    """Rank 96 of 128 is a dense layer beside the quantized one, not an adapter."""
    module, x = Between(ByHand(r=96)), x_MK()
    expected = eager(module, x)
    result = compiled(module, x)
    assert "extend_k" not in result.applied and "extend_k" not in result.reasons
    assert_same(result, expected)


def test_an_intermediate_that_is_returned_keeps_its_value() -> None:
    """The adapter's product has another user, so it cannot vanish into the main product."""

    class Leaky(ByHand):
        def forward(self, x: Tensor) -> Tensor:
            low = x @ self.a.t() @ self.b.t()
            return torch.cat([self.base(x) + low, low], -1)

    module, x = Leaky(), x_MK()
    expected = eager(module, x)
    result = compiled(module, x)
    assert "extend_k" not in result.applied
    assert_same(result, expected)


# --- DoRA ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("graph_or_code")
def test_dora_breaks_the_graph_and_stays_right(tmp_path: Path) -> None:
    """PEFT's DoRA makes Dynamo split the graph between the layer and its adapter: the layer itself
    is still canonical, nothing is to be folded, and the weight decoded for its norm is told."""
    module, x = Between(peft_adapters(config(8, 16, use_dora=True))), x_MK()
    expected = eager(module, x)
    path = tmp_path / "report.json"
    with testing.CompileTrace() as trace:
        result = compiled(module, x, options={"qfuse.report": str(path)})
    assert trace.breaks and result.report is not None
    sites = [s for c in json.loads(path.read_text())["compiles"] for s in c["sites"]]
    [refused] = [s for s in sites if s["rejected"]]
    assert refused["rejected"] == LEAVES and refused["pass_name"] == "canonicalize"
    assert all("GB" in reason or "Reason" in reason for reason in trace.breaks)
    assert result.ops["qfuse.dequantize"] == 3  # forward, backward, the weight's norm
    assert result.ops["qfuse.extend"] == 0
    assert not [op for op in result.ops if op.startswith("bitsandbytes")]
    assert_same(result, expected)


def test_dora_is_an_error_under_strict() -> None:
    module = Between(peft_adapters(config(8, 16, use_dora=True)))
    with pytest.raises(Exception) as raised:
        compiled(module, x_MK(), options={"qfuse.strict": True})
    inner = getattr(raised.value, "inner_exception", raised.value)
    assert isinstance(inner, NotFused)
    assert [reason for _, reason in inner.sites] == [LEAVES]


def test_a_norm_of_the_weight_in_the_graph_is_not_told() -> None:
    """What is returned is computed from the weight and is not the weight."""

    class Norm(ByHand):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.base.weight
            dense = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
            y: Tensor = x @ dense.t() / dense.norm(dim=1)
            return y

    result = compiled(Norm(), x_MK(), options={"qfuse.strict": True})
    assert result.applied["canonicalize"] and "canonicalize" not in result.reasons
