"""Every format through the passes that rewrite products: the plan is one for all, and values are
those of eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from inductor_q import ops
from inductor_q.formats import FORMATS
from inductor_q.testing import relative_error
from tests.support.compiling import compile_step, no_codegen, step
from tests.support.few_rows import finite
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
            "read_gradients": 4,
        },
    ),
}
#: How much larger the errors may be than eager's: by sums in another order, or because e4m3 rounds
#: by 2^-5 where bfloat16 does by 2^-9.
BOUNDS = {"bf16": 1.5, "fp8": 16.0}


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
    ours, theirs, true = (
        {"output": output, **gradients}
        for output, gradients in ((result.output, result.gradients), eager, exact)
    )
    for what in ("output", "x0") if dropout else true:
        error = relative_error(theirs[what], true[what])
        assert error < 0.025, what
        assert relative_error(ours[what], true[what]) <= BOUNDS[compute] * error, what


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


@pytest.mark.parametrize("name", NAMES)
def test_experts(name: str) -> None:
    """The stack is read packed, forward and backward, one group of rows being empty."""
    module, x = Experts(name), tokens().detach().flatten(0, 1).requires_grad_()
    offsets = torch.tensor([40, 40, 50, 96], dtype=torch.int32)
    expected, grads = step(module, x, offsets)
    result = compile_step(module, x, offsets, context=no_codegen())
    assert result.applied["fuse_scatter2scatter"] == 2
    assert result.ops["qfuse.scatter2scatter"] == 2 and not result.ops["qfuse.dequantize"]
    assert relative_error(result.output, expected) < 0.01
    assert relative_error(result.gradients["x0"], grads["x0"]) < 0.02
