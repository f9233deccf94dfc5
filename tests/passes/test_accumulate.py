"""Sums of products of matrices: added up in one buffer, and never in one that somebody else reads.

On x of two dimensions, where Inductor alone makes an `addmm` that copies its first input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from inductor_q import ops, testing
from inductor_q.backend import qfuse
from inductor_q.passes.fold_lora import STRICT
from tests.support.compiling import compile_step, step

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
N, K = 128, 64
SEPARATE: dict[str, Any] = {
    "qfuse.thresholds": {"extend_k.min_rows": 1 << 20},
    "fx_graph_cache": False,
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def matrix(*shape: int, dtype: torch.dtype = BF16, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) / math.sqrt(shape[-1])).to(dtype)


def lora(dtype: torch.dtype = BF16, **settings: Any) -> nn.Module:
    return testing.lora_linear(N, K, adapter_dtype=dtype, compute_dtype=dtype, **settings)


class Heads(nn.Module):
    """Three adapted layers over one input: their gradients of x are one sum of six products."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(lora(seed=i) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x) for layer in self.layers)
        return torch.tanh(q) + torch.sin(k) + torch.cos(v)


class Residual(nn.Module):
    """What is added beside the products stays an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = lora()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + torch.cat([x, x], 1)
        return y


class Kept(nn.Module):
    """The base product is read again, and returned: nobody may add to it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = testing.quantized_linear(matrix(N, K, seed=11))
        self.a = nn.Parameter(matrix(8, K, seed=5))
        self.b = nn.Parameter(matrix(N, 8, seed=6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return torch.cat([y + x @ self.a.t() @ self.b.t(), y])


def assert_close_to_float64(module: nn.Module, x: Tensor, options: dict[str, Any]) -> Any:
    """Output and gradients: no farther from float64 than 1.25 times eager."""
    eager = step(module, x, module=module)
    result = compile_step(module, x, options=options)
    reference = testing.reference_model(module)
    x64 = x.detach().double().requires_grad_()
    exact = step(reference, x64, module=reference)
    pairs = [(result.output, eager[0], exact[0])]
    assert result.gradients.keys() == eager[1].keys() == exact[1].keys()
    pairs += [(result.gradients[n], eager[1][n], exact[1][n]) for n in eager[1]]
    for mine, theirs, truth in pairs:
        error = testing.relative_error(mine, truth)
        assert error <= 1.25 * testing.relative_error(theirs, truth) + 1e-7
    return result


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("settings", [{}, {"bias": True}], ids=["plain", "bias"])
def test_a_layer(dtype: torch.dtype, settings: dict[str, Any], device: str) -> None:
    x = matrix(96, K, dtype=dtype).to(device).requires_grad_()
    result = assert_close_to_float64(lora(dtype, **settings).to(device), x, SEPARATE)
    assert result.applied["accumulate"] == 2
    assert result.ops["qfuse.accumulate"] == 2


@pytest.mark.parametrize("device", DEVICES)
def test_three_layers_over_one_input(device: str) -> None:
    module, x = Heads().to(device), matrix(96, K).to(device).requires_grad_()
    expected, grads = step(module, x, module=module)
    result = compile_step(module, x, options=SEPARATE)
    assert result.applied["accumulate"] == 4  # one for each layer, one in backward
    assert result.ops["qfuse.accumulate"] == 3 + 5
    assert testing.relative_error(result.output, expected) < 0.01
    for name, grad in grads.items():
        assert testing.relative_error(result.gradients[name], grad) < 0.015, name


def test_what_is_left_of_the_sum() -> None:
    module, x = Residual(), matrix(96, K).requires_grad_()
    expected, grads = step(module, x, module=module)
    result = compile_step(module, x, options=SEPARATE)
    assert result.ops["qfuse.accumulate"] == 2
    assert testing.relative_error(result.output, expected) < 0.01
    assert testing.relative_error(result.gradients["x0"], grads["x0"]) < 0.015


def test_a_product_that_is_read_again_is_left_alone() -> None:
    module, x = Kept(), matrix(96, K).requires_grad_()
    expected, _ = step(module, x, module=module)
    result = compile_step(module, x, options=SEPARATE)
    assert result.applied["accumulate"] == 1  # backward's
    torch.testing.assert_close(result.output[96:], expected[96:], rtol=0, atol=0)
    assert testing.relative_error(result.output, expected) < 0.01


@pytest.mark.parametrize("device", DEVICES)
def test_onto_what_bitsandbytes_multiplies(device: str) -> None:
    """Of few rows its `gemm_4bit` stays, and the adapter adds to its result."""
    module, x = lora().to(device), matrix(2, K).to(device)
    few: dict[str, Any] = {"qfuse.thresholds": {"canonicalize.min_rows": 4}}
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=qfuse, options=SEPARATE | few)
    result, (code,) = run_and_get_code(compiled, x)
    assert testing.relative_error(result.detach(), module(x).detach()) < 0.01
    assert "bitsandbytes.gemm_4bit.default(" in code and ".addmm_(" in code


def test_extended_sums_are_one_product_already() -> None:
    result = compile_step(lora(), matrix(96, K).requires_grad_())
    assert result.applied["extend_k"] == 1  # forward; its output's gradient comes from outside
    assert result.applied["accumulate"] == 1


def test_more_dimensions_are_left_to_inductor() -> None:
    result = compile_step(lora(), matrix(2, 48, K).requires_grad_(), options=SEPARATE)
    assert "accumulate" not in result.applied and result.ops["qfuse.accumulate"] == 0


def test_strict_numerics_keeps_the_sum() -> None:
    options = {**SEPARATE, "qfuse.numerics": "strict"}
    result = compile_step(lora(), matrix(96, K).requires_grad_(), options=options)
    assert "accumulate" not in result.applied
    assert set(result.reasons.get("accumulate", {STRICT: 0})) == {STRICT}


@pytest.mark.parametrize("device", DEVICES)
def test_any_number_of_rows(device: str) -> None:
    torch._dynamo.reset()
    module = lora(bias=True).to(device)
    compiled = torch.compile(module, backend=qfuse, options=SEPARATE, dynamic=True)
    with testing.CompileTrace() as trace:
        for rows in (96, 31, 2, K, N):  # as many as columns is no other case
            x = matrix(rows, K).to(device)
            assert testing.relative_error(compiled(x), module(x)) < 0.01
    assert trace.graphs == 1
    for rows in (0, 1):
        x = matrix(rows, K).to(device)
        assert compiled(x).shape == (rows, N)
    assert testing.relative_error(compiled(x), module(x)) < 0.01


# --- the op and its memory ----------------------------------------------------------------------


def test_opcheck() -> None:
    out, a, b = (matrix(*s, dtype=FP32).requires_grad_() for s in ((6, 8), (6, 3), (3, 8)))
    op = torch.ops.qfuse.accumulate.default
    torch.library.opcheck(op, (out, a, b))
    torch.library.opcheck(op, (out.detach(), a.detach(), b.detach()))
    double = [t.detach().double().requires_grad_() for t in (out, a, b)]
    assert torch.autograd.gradcheck(torch.ops.qfuse.accumulate, double)


def accumulate(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    result: Tensor = torch.ops.qfuse.accumulate(out, a, b)
    return result


def in_place(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.sin(accumulate(x @ w, a, b))


def twice(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.sin(accumulate(accumulate(x @ w, a, b), x, w))


def onto_an_input(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return accumulate(x, a, b)


def onto_a_view(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return accumulate((x @ w).t(), a, b)


def onto_what_is_read_again(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    y = x @ w
    return accumulate(y, a, b) * y


def onto_an_expansion(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    y = x @ w
    return torch.cat([accumulate(y.expand(16, 16), a, b), y])


def onto_what_it_multiplies(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    y = x @ w
    return torch.sin(accumulate(y, y, w))


def into_a_wider_matrix(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    y = accumulate(x @ w, a, b)
    return torch.cat([y, x], 1)


def into_an_extension(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    y = accumulate(x @ w, a, b)
    return ops.extend([y], [y], [w[:, :2].contiguous()])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "body, added",
    [
        (in_place, 1),
        (twice, 2),
        (into_a_wider_matrix, 1),
        (into_an_extension, 1),
        (onto_an_input, 0),
        (onto_an_expansion, 0),
        (onto_what_it_multiplies, 0),
        (onto_a_view, 0),
        (onto_what_is_read_again, 0),
    ],
)
def test_only_into_memory_that_nobody_else_reads(
    body: Callable[..., Tensor], added: int, device: str
) -> None:
    inputs = [matrix(*s, dtype=FP32).to(device) for s in ((16, 16), (16, 16), (16, 4), (4, 16))]
    before = [t.clone() for t in inputs]
    expected = body(*inputs)
    torch._dynamo.reset()
    compiled = torch.compile(body, backend=qfuse, options={"fx_graph_cache": False})
    result, (code,) = run_and_get_code(compiled, *inputs)
    torch.testing.assert_close(result, expected)
    assert code.count(".addmm_(") == added
    lines = [line for line in code.splitlines() if ".addmm_(" in line]
    assert not [line for line in lines if "=" in line]  # a second name would keep the buffer
    assert all(torch.equal(t, old) for t, old in zip(inputs, before, strict=True))
    torch.testing.assert_close(compiled(*inputs), expected)
