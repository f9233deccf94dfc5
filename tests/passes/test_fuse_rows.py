"""Layers of few rows of one input share a launch with their adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inductor_q import testing
from inductor_q.passes.fold_lora import STRICT
from inductor_q.passes.fuse_rows import LINEARS, TRAINED
from tests.support.compiling import Compiled, compile_step, count_ops, no_codegen, step
from tests.support.few_rows import serve_rows

for extra in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(extra)


@pytest.fixture(autouse=True)
def a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_rows(monkeypatch)


#: As on a GPU, whatever the preset of CPUs says.
FEW: dict[str, Any] = {"qfuse.thresholds": {"linear_rows.max_rows": 16}}


def model(adapter: torch.dtype = torch.bfloat16) -> Any:
    return testing.qlora_model(
        testing.tiny_qwen3_config(num_hidden_layers=1),
        compute_dtype=torch.bfloat16,
        adapter_dtype=adapter,
        randomize_adapters=True,
    ).eval()


def tokens() -> Tensor:
    return torch.randint(0, 256, (1, 6), generator=torch.Generator().manual_seed(1))


def compiled(module: nn.Module, rows: Tensor, **options: Any) -> Compiled:
    def logits(ids: Tensor) -> Tensor:
        out: Tensor = module(input_ids=ids, use_cache=False).logits
        return out

    with torch.no_grad():
        return compile_step(
            logits, rows, module=module, options={**FEW, **options}, context=no_codegen()
        )


@pytest.mark.parametrize("adapter", [torch.bfloat16, torch.float32], ids=str)
def test_a_decoder_layer_has_four_launches(adapter: torch.dtype) -> None:
    """q, k and v; o; gate and up, multiplied; down: each with its adapter."""
    module, ids = model(adapter), tokens()
    result = compiled(module, ids)
    assert result.ops["qfuse.linears"] == 4 and not result.ops["qfuse.linear"]
    assert result.ops["mm"] == 1  # the head
    assert result.applied["fuse_rows"] == 4 and not result.ops["exp"]
    exact = testing.reference_model(module)(input_ids=ids).logits
    with torch.no_grad():
        theirs = testing.relative_error(module(input_ids=ids).logits, exact)
    assert testing.relative_error(result.output, exact) <= 1.25 * theirs
    assert "7 of 7 quantized layers fused" in result.report.summary()


def test_strict_keeps_products_and_sums_as_written() -> None:
    module, ids = model(), tokens()
    result = compiled(module, ids, **{"qfuse.numerics": "strict"})
    assert result.reasons["fuse_rows"] == {STRICT: 7}
    assert result.ops["qfuse.linears"] == 2 and result.ops["qfuse.linear"] == 2
    assert result.ops["mm"] == 15
    with torch.no_grad():
        assert torch.equal(result.output, module(input_ids=ids).logits)


class Two(nn.Module):
    """Two layers of one input, of which one has an adapter that something else reads, too."""

    def __init__(self, leaks: bool) -> None:
        super().__init__()
        weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16() * 0.1
        self.first, self.second = (testing.quantized_linear(w) for w in (weight, weight.flip(0)))
        self.a = nn.Parameter(weight[:8] * 4)
        self.b = nn.Parameter(weight[:, :8] * 2)
        self.leaks = leaks

    def forward(self, x: Tensor) -> Tensor:
        low = x @ self.a.t()
        adapted = self.first(x) + (low @ self.b.t()) * 0.5
        y: Tensor = adapted * self.second(x).tanh()
        return y + low.sum() if self.leaks else y


@pytest.mark.parametrize("leaks", [False, True])
def test_an_adapter_that_something_else_reads_stays(leaks: bool) -> None:
    module, x = Two(leaks).requires_grad_(False), torch.randn(3, 64).bfloat16()
    result = compile_step(
        module, x, options=FEW
    )  # generated code, too: of lists with nothing in some places
    assert result.ops["qfuse.linears"] == 1
    assert result.ops["mm"] == (2 if leaks else 0)
    torch.testing.assert_close(result.output, step(module, x)[0], rtol=3e-2, atol=3e-2)


def wide(one: Two, x: Tensor) -> Tensor:
    """The gate stays float32, and so does the product."""
    y: Tensor = F.silu(one.first(x).float()) * one.second(x)
    return y


def across(one: Two, x: Tensor) -> Tensor:
    """Each row's gate meets all rows."""
    y: Tensor = F.silu(one.first(x.view(4, 1, 64))) * one.second(x)
    return y


def regrouped(one: Two, x: Tensor) -> Tensor:
    """Of the adapter's products the second one has half as many columns as the layer."""
    low = (x @ one.a.t()).view(8, 4)
    high = low @ one.a.view(128, 4)[:32].t()
    y: Tensor = (one.first(x) + high.view(4, 64)) * one.second(x).tanh()
    return y


@pytest.mark.parametrize("run", [wide, across, regrouped])
def test_what_only_looks_like_a_gate_or_an_adapter(
    run: Callable[[Two, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = Two(False).requires_grad_(False), torch.randn(4, 64).bfloat16()
    monkeypatch.setattr(Two, "forward", run)
    result = compile_step(module, x, options=FEW, context=no_codegen())
    (call,) = result.joint[0].find_nodes(op="call_function", target=LINEARS)
    assert len(call.meta["val"]) == 2  # the layers share a launch, and no more
    torch.testing.assert_close(result.output, run(module, x), rtol=3e-2, atol=3e-2)


def test_a_backward_pass_keeps_the_layers_apart() -> None:
    module, x = Two(False), torch.randn(3, 64).bfloat16()
    result = compile_step(module, x, options=FEW, context=no_codegen())
    assert result.reasons["fuse_rows"] == {TRAINED: 1}
    assert set(result.gradients) >= {"a", "b"}
    assert count_ops(result.joint[0])["qfuse.linear"] == 2
