"""widen_products.py: products in 16 bits on CPUs that compute them slowly."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass
from torch.nn import functional as F

import inductor_q
from inductor_q import testing
from inductor_q.backend import qfuse
from inductor_q.kernels import wide
from inductor_q.passes.fold_lora import STRICT
from inductor_q.passes.graph import tensor
from inductor_q.passes.runner import Pass, listeners
from inductor_q.passes.widen_products import PRODUCTS
from inductor_q.testing import relative_error
from tests.support.compiling import Between, Compiled, compile_step, step
from tests.support.moe import Sizes, layer, results

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAME = "widen_products"
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
    return [site for site in report.sites if site.pass_name == NAME]


def adapted(dtype: torch.dtype) -> nn.Module:
    return Between(testing.lora_linear(K, K, adapter_dtype=dtype, compute_dtype=dtype))


@pytest.fixture
def operands() -> Iterator[Counter[torch.dtype]]:
    """Count the dtypes of what products of the lowered graphs read."""
    found: Counter[torch.dtype] = Counter()

    def look(step: Pass, graph: fx.Graph, when: str) -> None:
        if step.name == NAME and when == "after":
            for node in graph.nodes:
                if node.target in PRODUCTS:
                    found.update(tensor(n).dtype for n in node.all_input_nodes)

    listeners.append(look)
    yield found
    listeners.remove(look)


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
def test_a_layer_is_as_near_to_float64_as_eager(
    dtype: torch.dtype, slow: None, operands: Counter[torch.dtype]
) -> None:
    found = compiled_as_near_as_eager(adapted(dtype), x_MK(dtype=dtype))
    assert {(s.provider, s.rejected) for s in sites(found.report)} == {("float32", "")}
    assert {*operands} == {FP32}


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


def test_every_product(slow: None, operands: Counter[torch.dtype]) -> None:
    """Also of a matrix with itself, and attention's gradients."""
    torch.manual_seed(0)
    found = compiled_as_near_as_eager(Others(), x_MK(2 * K), at_least=2**-6)
    counts = Counter(site.target.removeprefix("aten.") for site in sites(found.report))
    assert counts.pop("_scaled_dot_product_flash_attention_for_cpu_backward.default") == 2
    assert {*counts} == {f"{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm")}
    assert {*operands} == {FP32}


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
    errors = {
        name: [relative_error(t[name], truth[name]) for t in (found, narrow)] for name in narrow
    }
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in narrow.items()}
    assert all(error <= 1.05 * before for error, before in errors.values()), errors
    assert any(error < before for error, before in errors.values()), errors


class Selected(nn.Module):
    """A quantized layer, and a product with as many columns as a mask has ones."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = testing.quantized_linear(torch.randn(K, K, dtype=BF16) / 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.packed(x) @ x.index_select(0, mask.nonzero().squeeze(-1)).t()
        return y


def test_sizes_that_depend_on_data(slow: None) -> None:
    module, x, mask = Selected(), x_MK(64)[0].detach(), torch.arange(32) % 3 == 0
    right = module(x, mask)
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = torch.compile(module, backend=qfuse, fullgraph=True)(x, mask)
    assert sites() and relative_error(found, right.double()) < 0.01


class Dropping(nn.Module):
    """Two dropouts, of a product and of its input, which is cast behind both."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = testing.quantized_linear(torch.randn(K, K, dtype=BF16) / 8)

    def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self.packed(x))
        return F.dropout(h @ w), F.dropout(x), h.float() * 2


def test_random_numbers_are_drawn_in_the_order_of_the_program(slow: None) -> None:
    module, x, w = Dropping(), x_MK().detach(), torch.randn(K, K).to(BF16)
    torch.manual_seed(1)
    eager = module(x, w)
    torch.compiler.reset()
    compiled = torch.compile(module, backend=qfuse, options={"fallback_random": True})
    torch.manual_seed(1)
    for found, right in zip(compiled(x, w)[:2], eager[:2], strict=True):
        assert torch.equal(found == 0, right == 0)
    assert sites()


def test_the_report_has_what_backward_adds(slow: None, tmp_path: Path) -> None:
    """In its file, and where torch's caches have the graph, whole or as Inductor lowered it."""
    module, x, path = adapted(BF16), x_MK(), tmp_path / "report.json"
    options: Any = {"qfuse.report": str(path)}

    def count() -> tuple[int, int]:
        torch.compiler.reset()
        step(torch.compile(module, backend=qfuse, options=options), x, module=module)
        written = json.loads(path.read_text())["compiles"][-1]
        return len(sites()), sum(s["pass_name"] == NAME for s in written["sites"])

    with testing.fresh_cache():
        fresh = count()
        assert fresh[0] == fresh[1] > 3
        assert count() == fresh
        with functorch_config.patch(enable_autograd_cache=False):
            assert count() == fresh


def test_a_pass_of_the_users_is_told_of_inference(slow: None) -> None:
    kind: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
    if kind is None:
        pytest.skip("torch before 2.13 tells no pass")

    class Aware(kind):  # type: ignore[misc]
        told: ClassVar[list[bool]] = []

        def __call__(self, graph: fx.Graph, is_inference: bool) -> None:
            self.told.append(is_inference)

        def uuid(self) -> str:
            return "aware"

    aware = Aware()
    with inductor_config.patch(post_grad_custom_post_pass=aware):
        found = compile_step(adapted(BF16), x_MK())
    assert aware.told == [False, False] and sites(found.report)
