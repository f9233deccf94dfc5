"""`qfuse explain --numerics`: the error of each layer's products in eight bits, of its inputs."""

from __future__ import annotations

import os
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inductor_q import comparison, testing
from inductor_q.diagnostics.explanation import Explanation, ProductError
from inductor_q.diagnostics.merge import merge
from inductor_q.diagnostics.observation import NOT_COMPARED, observe
from inductor_q.diagnostics.render import html, text, words
from inductor_q.diagnostics.render.json import from_json, to_json
from tests.support.compiling import no_codegen, step
from tests.support.thresholds import ANY_PRODUCT

BF16 = torch.bfloat16


class Two(nn.Module):
    """A quantized layer, and one in 16 bits of whose input one number is far larger than others."""

    def __init__(self) -> None:
        super().__init__()
        pytest.importorskip("bitsandbytes")
        self.even = testing.lora_linear(64, 64, adapter_dtype=BF16)
        self.uneven = nn.Linear(64, 64, bias=False, dtype=BF16).requires_grad_(False)
        factor = torch.ones(64, dtype=BF16)
        factor[3] = 300.0
        self.factor = nn.Buffer(factor)
        self.uneven.weight[:, 3].data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.even(torch.tanh(x)))
        return torch.tanh(self.uneven(x * self.factor))


def tokens() -> Tensor:
    x = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(3)).to(BF16)
    return x.requires_grad_()


def observed(module: nn.Module, numerics: str, **options: Any) -> tuple[Explanation, Any]:
    torch._dynamo.reset()
    given = {
        "qfuse.thresholds": ANY_PRODUCT,
        **options,
    }
    with observe(numerics=numerics) as observation, no_codegen():
        call: Any = torch.compile(module, backend=testing.qfuse_backend(), options=given)
        outcome = step(call, tokens(), module=module)
    return observation.explanation(), outcome


def test_each_layer_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QFUSE_COMPUTE", raising=False)
    module = Two()
    run, (output, grads) = observed(module, "int8")
    uneven, even = run.numerics  # the worst first
    assert (uneven.module, even.module) == ("uneven", "even.proj")
    assert uneven.forward > 0.3  # the scale is that of one number, which the weight ignores
    assert 0.003 < even.forward < 0.03
    assert 0.003 < even.backward < 0.03
    assert words.exclusion(run).endswith('"qfuse.compute.exclude": "uneven"')
    # The step itself is that in 16 bits.
    expected, gradients = step(module, tokens(), module=module)
    torch.testing.assert_close(output, expected, rtol=0.02, atol=0.01)
    assert gradients.keys() == grads.keys()
    assert "QFUSE_COMPUTE" not in os.environ
    assert comparison.active() == ()


def test_e4m3_holds_outliers() -> None:
    run, _ = observed(Two(), "fp8")
    assert all(0.01 < layer.worst < 0.05 for layer in run.numerics)
    assert len(run.numerics) == 2
    assert words.exclusion(run) == "no layer stands out: none has 1.5 times the median error"


def test_excluded_layers_are_not_compared() -> None:
    run, _ = observed(Two(), "int8", **{"qfuse.compute.exclude": "uneven"})
    assert [layer.module for layer in run.numerics] == ["even.proj"]


def test_nothing_to_compare_is_told() -> None:
    run, _ = observed(Two(), "fp8", **{"qfuse.compute": "bf16"})
    assert run.numerics == ()
    assert NOT_COMPARED in run.warnings


ERRORS = (ProductError("a", 0.2, 0.03), ProductError("b", 0.0375), ProductError("c", 0.04))
RUN = Explanation(target="t", numerics=ERRORS)


def page(run: Explanation) -> str:
    return html.render(run)


def printed(run: Explanation) -> str:
    out = StringIO()
    text.write(run, out)
    return out.getvalue()


@pytest.mark.parametrize("render", [page, printed])
def test_what_is_shown(render: Callable[[Explanation], str]) -> None:
    shown = render(RUN)
    assert "4.00% in the median layer" in shown
    assert "20.00% forward" in shown
    assert "that stand out" in shown
    assert "median layer" not in render(Explanation(target="t"))


def test_as_json_and_over_ranks() -> None:
    assert from_json(to_json(RUN)) == RUN
    other = Explanation(target="t", rank=1, numerics=(ProductError("b", 0.5),))
    assert {layer.module: layer.worst for layer in merge([RUN, other]).numerics}["b"] == 0.5
