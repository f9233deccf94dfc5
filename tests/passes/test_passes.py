"""Every pass on graphs of real bitsandbytes and PEFT layers: what matched, what was refused and
why, what the graph is made of afterwards, and that the values are still those of eager."""

from __future__ import annotations

import contextlib
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

from inductor_q.passes.fuse_dropout import EAGER
from tests.support.adapted_layers import (
    BF16,
    FP32,
    ByHand,
    ByOp,
    Float32,
    K,
    N,
    Shared,
    SharedPlain,
    assert_same,
    compiled,
    config,
    eager,
    linear,
    lora,
    peft_adapters,
    x_MK,
)
from tests.support.compiling import Between
from tests.support.processes import ROOT, environment

bnb = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

OLD_BNB = Path(os.environ.get("INDUCTOR_Q_BNB049") or Path(sys.prefix) / "bnb049")


STRICT = "qfuse.numerics='strict' keeps every product as written"
FLOAT32 = (
    "float32 adapter on a 16-bit activation: its products stay float32 "
    "(autocast, 16-bit adapters or qfuse.numerics='relaxed' let them join the main product)"
)


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
