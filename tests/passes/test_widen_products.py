"""widen_products.py: products in 16 bits on CPUs that compute them slowly."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import inductor_q
from inductor_q import testing
from inductor_q.backend import qfuse
from inductor_q.kernels import wide
from inductor_q.passes.fold_lora import STRICT
from inductor_q.testing import relative_error
from tests.support.compiling import OF_THE_CPU, Between, Compiled, compile_step, step
from tests.support.moe import Sizes, layer, results

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALVES = (BF16, FP16)
K = 64


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this CPU count as slow in both dtypes."""
    monkeypatch.setattr(wide, "slow_dtypes", lambda: HALVES)


def x_MK(rows: int = 96, dtype: torch.dtype = BF16) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, rows // 2, K, generator=generator).to(dtype).requires_grad_()


def sites(report: Any = None) -> list[Any]:
    report = report or inductor_q.last_report()
    return [site for site in report.sites if site.pass_name == OF_THE_CPU]


def adapted(dtype: torch.dtype) -> nn.Module:
    return Between(testing.lora_linear(K, K, adapter_dtype=dtype, compute_dtype=dtype))


def compiled_as_near_as_eager(module: nn.Module, x: Tensor, at_least: float = 0.0) -> Compiled:
    """Compile a step, none of whose results is further from float64 than 1.25 times eager's, or
    than `at_least`."""
    output, eager = step(module, x, module=module)
    exact = testing.reference_model(module)
    truth, right = step(exact, x.detach().double().requires_grad_(), module=exact)
    found = compile_step(module, x)
    assert relative_error(found.output, truth) <= 1.25 * relative_error(output, truth)
    assert found.gradients.keys() == eager.keys()
    for name, gradient in found.gradients.items():
        assert gradient.dtype == eager[name].dtype
        error = relative_error(gradient, right[name])
        assert error <= max(1.25 * relative_error(eager[name], right[name]), at_least), name
    return found


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_layer_is_as_near_to_float64_as_eager(dtype: torch.dtype, slow: None) -> None:
    found = compiled_as_near_as_eager(adapted(dtype), x_MK(dtype=dtype))
    assert {(s.provider, s.rejected) for s in sites(found.report)} == {("float32", "")}


class Others(nn.Module):
    """A quantized layer, and every other product that the pass knows."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = testing.quantized_linear(torch.randn(K, K, dtype=BF16) / 8)
        self.bias = nn.Parameter(torch.randn(K, dtype=BF16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.packed(x)
        scores = torch.baddbmm(x @ x.mT, y, y.mT, beta=1 / K, alpha=1 / K)
        y = torch.addmm(self.bias, y[0], x[0], alpha=1 / K) + torch.bmm(scores, y)[:, :1] / K
        heads = y.unflatten(-1, (4, -1)).transpose(1, 2)
        mask = torch.outer(x[0, :, 0], x[0, :, 1]).detach()
        y = F.scaled_dot_product_attention(heads, heads, heads, mask)
        return y + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def test_every_product(slow: None) -> None:
    """Also of a matrix with itself, and attention's gradients."""
    torch.manual_seed(0)
    found = compiled_as_near_as_eager(Others(), x_MK(2 * K), at_least=2**-6)
    counts = Counter(site.target.removeprefix("aten.") for site in sites(found.report))
    assert counts.pop("_scaled_dot_product_flash_attention_for_cpu_backward.default") == 2
    assert {*counts} == {f"{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm")}


def test_what_is_left(slow: None) -> None:
    """Products in float32, under "strict", of few rows with a transposed weight; and by option."""
    assert not sites(compile_step(adapted(FP32), x_MK(dtype=FP32)).report)
    strict = compile_step(adapted(BF16), x_MK(), options={"qfuse.numerics": "strict"})
    assert {s.rejected for s in sites(strict.report)} == {STRICT}
    decoded: Any = {"qfuse.thresholds": {"linear_rows.max_rows": 0}}
    few = compile_step(adapted(BF16), x_MK(4), options=decoded)
    told = "4 rows, fewer than widen_products.min_rows=16 of the preset"
    assert {s.rejected for s in sites(few.report)} == {"", told}
    assert all(s.by_choice for s in sites(few.report) if s.rejected)
    off = compile_step(adapted(BF16), x_MK(), options={"qfuse.passes": "-widen_products"})
    assert not sites(off.report)


def test_a_cpu_that_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide, "slow_dtypes", tuple)
    assert not sites(compile_step(adapted(BF16), x_MK()).report)


def test_any_number_of_rows(slow: None) -> None:
    module = adapted(BF16)
    torch.compiler.reset()
    compiled = torch.compile(module, backend=qfuse, dynamic=True)
    with testing.CompileTrace() as trace:
        for rows in (64, 80, 8):
            x = x_MK(rows)
            found, _ = step(compiled, x, module=module)
            right, _ = step(module, x, module=module)
            assert relative_error(found, right.double()) < 0.01
    assert trace.graphs == 1


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_experts(dtype: torch.dtype, slow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One expert after the other, forward and backward: nearer to float64 than in 16 bits."""
    case = layer(Sizes(4, 64, 48, 32, 2, 4), dtype=dtype, bias=True)
    exact = case.exact(torch.float64)
    truth = results(exact, exact.loop())
    found = results(case, case())
    monkeypatch.setattr(wide, "slow_dtypes", tuple)
    narrow = results(case, case())
    for name, value in found.items():
        assert value.dtype == narrow[name].dtype
        error, before = (relative_error(t[name], truth[name]) for t in (found, narrow))
        assert error <= 1.05 * before, name
