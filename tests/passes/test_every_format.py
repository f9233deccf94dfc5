"""Every format through the passes that rewrite products: the plan is one for all, and values are
those of eager mode. `unwrap_weights`, which is for tensor subclasses, is in test_every_subclass.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from inductor_q import ops
from inductor_q.formats import FORMATS
from inductor_q.passes.graph import MM, last_size
from inductor_q.passes.stack_products import BATCHED, STACKED
from inductor_q.testing import relative_error
from tests.support.compiling import Compiled, compile_step, no_codegen, step
from tests.support.few_rows import finite, serve_rows
from tests.support.marks import as_torch_2_11_marks
from tests.support.thresholds import ANY_PRODUCT

BF16 = torch.bfloat16
SIZE, RANK = 128, 8
#: Formats of the default group, one of each kind of scale and layout; the others are slow's.
FIRST = {
    *("kbit3_e4m4", "int4_g32", "int4_tiles_g32", "fp8_e4m3_128x128"),
    *("mxfp4", "nvfp4_rows", "nvfp4_tiles", "hqq4_g64_bf16"),
}
NAMES = [pytest.param(n, marks=() if n in FIRST else pytest.mark.slow) for n in FORMATS]

THRESHOLDS = {**ANY_PRODUCT, "extend_k.min_rows": 1, "fuse_dropout.min_rows": 1}
ANY_EXPERT = {**ANY_PRODUCT, "quantize_products.min_expert_elements": 1}
#: What `qfuse.compute` is, the probability of dropout, and how many sites each pass rewrites.
CASES: dict[str, tuple[str, float, dict[str, int]]] = {
    "bf16": (
        *("bf16", 0.0),
        {
            **{"canonicalize": 4, "fold_lora": 24, "stack_adapters": 1, "extend_k": 2},
            **{"stack_gradients": 1, "keep_checkpointed": 1, "keep_packed": 4, "read_gradients": 2},
        },
    ),
    "fp8": (
        *("fp8", 0.0),
        {
            **{"canonicalize": 4, "fold_lora": 24, "stack_adapters": 1, "quantize_products": 8},
            **{"stack_gradients": 1, "keep_checkpointed": 1, "keep_packed": 2, "read_gradients": 4},
        },
    ),
    "dropout": (
        *("bf16", 0.25),
        {
            **{"canonicalize": 4, "fuse_dropout": 4, "fold_lora": 12, "extend_k": 5},
            **{"keep_checkpointed": 1, "keep_packed": 2, "decode_again": 3, "project_in_place": 3},
            **{"add_gradients": 2, "read_gradients": 4},
        },
    ),
}
#: How much larger the errors may be than eager's: by sums in another order, or because e4m3 rounds
#: by 2^-5 where bfloat16 does by 2^-9.
BOUNDS = {"bf16": 1.5, "fp8": 16.0}

#: Sites where the products of a checkpointed segment have no marks, and none of them may be kept.
UNMARKED = {**CASES["bf16"][2], "recompute_products": 4}


class Layer(nn.Module):
    """A layer whose weight the graph decodes, with an adapter. Of inputs as large as `gain` its
    results are near 1."""

    def __init__(self, name: str, seed: int, dropout: float) -> None:
        super().__init__()
        self.format, self.dropout = name, dropout
        operands, _ = finite(FORMATS[name], (SIZE, SIZE), seed, like_trained=True)
        for i, operand in enumerate(operands):
            self.register_buffer(f"operand_{i}", operand)
        self.gain = float(SIZE**-0.5 / self.weight(torch.float32).square().mean().sqrt())
        generator = torch.Generator().manual_seed(seed)
        a, b = (torch.randn(s, generator=generator) for s in ((RANK, SIZE), (SIZE, RANK)))
        self.a = nn.Parameter((a * SIZE**-0.5 / self.gain).to(BF16))
        # Under dropout B is zero, as it is at first: the mask changes its gradient alone.
        self.b = nn.Parameter((b * (0 if dropout else 0.1)).to(BF16))

    def weight(self, dtype: torch.dtype) -> Tensor:
        return ops.dequantize([*self.buffers()], self.format, (SIZE, SIZE), dtype)

    def forward(self, x: Tensor) -> Tensor:
        dropped = F.dropout(x, self.dropout) if self.dropout else x
        low = dropped @ self.a.to(x.dtype).t() @ self.b.to(x.dtype).t()
        y: Tensor = F.linear(x, self.weight(BF16).to(x.dtype)) + low * 2.0
        return y


class Segment(nn.Module):
    """A checkpointed segment: three layers over one input, and one that reads their results."""

    def __init__(self, name: str, dropout: float) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList([Layer(name, i, dropout) for i in range(4)])

    def segment(self, x: Tensor) -> Tensor:
        q, k, v, o = self.layers
        x = torch.tanh(x) * q.gain
        y: Tensor = o(torch.tanh(q(x) * k(x) + v(x)) * o.gain)
        return y

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.segment, x, use_reentrant=False)
        return torch.tanh(y)


def values(result: Compiled) -> dict[str, Tensor]:
    return {"output": result.output, **result.gradients}


def tokens(dtype: torch.dtype = BF16) -> Tensor:
    x = torch.randn(2, 48, SIZE, generator=torch.Generator().manual_seed(0)).to(BF16)
    return x.to(dtype).requires_grad_()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_a_training_step(name: str, case: str) -> None:
    """Values and gradients are as near to float64's as eager's, or as FP8 is.

    Under dropout only what no mask changes is compared; test_fuse_dropout.py is about masks.
    """
    compute, dropout, applied = CASES[case]
    module = Segment(name, dropout)
    eager = step(module, tokens(), module=module)
    exact = step(module, tokens(torch.float64), module=module)
    options: dict[str, Any] = {"qfuse.compute": compute, "qfuse.thresholds": THRESHOLDS}
    result = compile_step(module, tokens(), options=options, context=no_codegen())
    assert result.applied == applied
    assert result.gradients.keys() == eager[1].keys() and len(eager[1]) == 9
    ours = values(result)
    theirs, true = ({"output": y, **gradients} for y, gradients in (eager, exact))
    for what in ("output", "x0") if dropout else true:
        error = relative_error(theirs[what], true[what])
        assert error < 0.025, what
        assert relative_error(ours[what], true[what]) <= BOUNDS[compute] * error, what

    if compute == "fp8":  # of the gradients of three layers with one input, sum_products makes one
        (joint,) = result.joint
        products = joint.find_nodes(op="call_function", target=MM)
        assert [last_size(node.args[0]) for node in products].count(3 * SIZE) == 1


@pytest.mark.parametrize("name", NAMES)
def test_products_of_a_segment_are_computed_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch 2.11 has it: they are not marked, and backward would keep them."""
    as_torch_2_11_marks(monkeypatch)
    module = Segment(name, 0.0)
    expected = step(module, tokens(), module=module)
    exact = step(module, tokens(torch.float64), module=module)
    thresholds = {**THRESHOLDS, "recompute_products.max_kept": 0}
    result = compile_step(
        module, tokens(), options={"qfuse.thresholds": thresholds}, context=no_codegen()
    )
    assert result.applied == UNMARKED
    theirs, true = ({"output": y, **gradients} for y, gradients in (expected, exact))
    for what, found in values(result).items():
        error = relative_error(theirs[what], true[what])
        assert relative_error(found, true[what]) <= BOUNDS["bf16"] * error, what


@pytest.mark.parametrize("name", NAMES)
def test_few_rows_without_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers of one input are one launch with their adapters, and the fourth is another;
    nothing is decoded."""
    serve_rows(monkeypatch)
    module, x = Segment(name, 0.0), tokens().detach()[0, :3]
    options = {"qfuse.thresholds": {"linear_rows.max_rows": 16}}
    with torch.no_grad():
        result = compile_step(module.segment, x, options=options, context=no_codegen())
        eager, exact = module.segment(x), module.segment(x.double())
    assert result.applied == {"canonicalize": 4, "read_packed": 4, "fuse_rows": 2}
    assert result.ops["qfuse.linears"] == 2
    assert not result.ops["qfuse.dequantize"] and not result.ops["mm"]
    assert relative_error(result.output, exact) <= BOUNDS["bf16"] * relative_error(eager, exact)


class Experts(nn.Module):
    """Groups of rows times the experts of a stack, which the graph decodes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.format, self.shape = name, (4, SIZE, SIZE)
        operands, values = finite(FORMATS[name], (4 * SIZE, SIZE), 0, like_trained=True)
        self.gain = float(SIZE**-0.5 / values.square().mean().sqrt())
        for i, operand in enumerate(operands):
            self.register_buffer(f"operand_{i}", operand)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        weight = ops.dequantize([*self.buffers()], self.format, self.shape, BF16)
        rows = torch.tanh(x) * self.gain
        return torch.tanh(torch._grouped_mm(rows, weight.transpose(1, 2), offs=offsets))


class Slices(Experts):
    """The same stack by parts: one expert by itself, and some as a batch."""

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        weight = ops.dequantize([*self.buffers()], self.format, self.shape, BF16)
        rows = (torch.tanh(x) * self.gain).view(2, -1, SIZE)
        one = F.linear(rows[0], weight[0])
        return torch.tanh(one + torch.bmm(rows, weight[1:3].transpose(1, 2)))


#: What `qfuse.compute` is, and how large the errors may be: sums in another order, rounded to
#: bfloat16; or e4m3's, of 2^-5 for each factor, which go with the root of two factors' squares.
EXPERTS = {"bf16": 0.01, "fp8": 2**-5 * 2**0.5}


@pytest.mark.parametrize("compute", EXPERTS)
@pytest.mark.parametrize("name", NAMES)
def test_experts(name: str, compute: str) -> None:
    """The stack is read packed, forward and backward, one group of rows being empty."""
    module, x = Experts(name), tokens().detach().flatten(0, 1).requires_grad_()
    offsets = torch.tensor([40, 40, 50, 96], dtype=torch.int32)
    expected, grads = step(module, x, offsets)
    options: dict[str, Any] = {"qfuse.compute": compute, "qfuse.thresholds": ANY_EXPERT}
    result = compile_step(module, x, offsets, options=options, context=no_codegen())
    assert result.applied["fuse_scatter2scatter"] == 2
    assert result.ops["qfuse.scatter2scatter"] == 2 and not result.ops["qfuse.dequantize"]
    assert result.applied.get("quantize_products", 0) == (2 if compute == "fp8" else 0)
    error = EXPERTS[compute]
    assert relative_error(result.output, expected) < error
    assert relative_error(result.gradients["x0"], grads["x0"]) < 2 * error


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_a_stack_stay_in_16_bits(name: str) -> None:
    """With the reason, forward and backward; and bitwise, since nothing is rewritten."""
    module, x = Slices(name), tokens().detach().flatten(0, 1).requires_grad_()
    offsets = torch.empty(0)
    expected, grads = step(module, x, offsets)
    options: dict[str, Any] = {"qfuse.compute": "fp8", "qfuse.thresholds": ANY_EXPERT}
    result = compile_step(module, x, offsets, options=options, context=no_codegen())
    assert result.reasons["quantize_products"] == {STACKED: 2, BATCHED: 2}
    assert result.applied == {"canonicalize": 1, "keep_packed": 1}
    assert torch.equal(result.output, expected)
    assert torch.equal(result.gradients["x0"], grads["x0"])
