"""What a user sees of the passes: options, their order, why sites were refused, and DoRA."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from inductor_q import testing
from inductor_q.exc import NotFused
from inductor_q.passes import PIPELINE
from inductor_q.passes.canonicalize import LEAVES
from tests.support.adapted_layers import (
    BF16,
    FP32,
    TANGENTS,
    ByHand,
    K,
    N,
    Shared,
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

bnb = pytest.importorskip("bitsandbytes")


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
