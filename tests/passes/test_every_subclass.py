"""Every tensor subclass of torchao's through the passes: what it holds is read in Dynamo's graph,
and from there the plan is the one that test_every_format.py has for every format."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import inductor_q
from inductor_q import capture
from inductor_q.testing import relative_error
from tests.passes.test_every_format import (
    BOUNDS,
    CASES,
    SIZE,
    THRESHOLDS,
    Layer,
    Segment,
    tokens,
)
from tests.support.compiling import compile_step, no_codegen, step
from tests.support.torchao_weights import CONFIGS, int4_tiles, linear, mx, nf4

#: What makes a weight, by its format. A row of 128 is one group of `int8_g128`, so `int8_row`.
#: torchao's plain int4 is left out: Dynamo calls a kernel for it that GPUs alone have.
WEIGHTS: dict[str, Callable[[], Any]] = {
    **{
        format: functools.partial(lambda config: linear(config, SIZE, SIZE).weight.data, config)
        for config, format in CONFIGS.values()
        if format != "int8_g128"
    },
    # The codes are written by the layout's own formula, which takes a second.
    "int4_tiles_g32": functools.cache(lambda: int4_tiles(SIZE, SIZE, 32)[0]),
    "nf4_tensor_b64": lambda: nf4(SIZE, SIZE),
    "mxfp4": lambda: mx("float4_e2m1fn_x2", SIZE, SIZE),
    "mxfp8_e4m3": lambda: mx("float8_e4m3fn", SIZE, SIZE),
    "mxfp8_e5m2": lambda: mx("float8_e5m2", SIZE, SIZE),
}
#: Formats of the default group, one of each class; the others are slow's.
FIRST = ("int8_row", "int8_g32", "fp8_e4m3_row", "nvfp4_tiles", "int4_tiles_g32", "mxfp4")
NAMES = [pytest.param(n, marks=() if n in FIRST else pytest.mark.slow) for n in WEIGHTS]


class Wrapped(Layer):
    """A layer whose weight is one tensor of torchao's; its products are torchao's own, but for the
    MX formats, of which it has none that leaves the input as it is."""

    def __init__(self, format: str, like: Layer, *, plain: bool) -> None:
        nn.Module.__init__(self)
        weight = WEIGHTS[format]()
        found = capture.layout(weight)
        assert found is not None and found.format == format
        values = inductor_q.dequantize(weight)
        self.format, self.dropout, self.a, self.b = format, 0.0, like.a, like.b
        self.gain = float(SIZE**-0.5 / values.float().square().mean().sqrt())
        self.packed = nn.Parameter(values if plain else weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.packed
        if self.format.startswith("mx") and type(weight.data) is not Tensor:
            weight = weight.dequantize()
        if x.dtype is not weight.dtype:  # the reference in float64, which plain values have
            weight = weight.to(x.dtype)
        low = x @ self.a.to(x.dtype).t() @ self.b.to(x.dtype).t()
        y: Tensor = F.linear(x, weight) + low * 2.0
        return y


def segment(format: str, *, plain: bool) -> Segment:
    """Make a checkpointed segment of such layers; `plain` ones hold the decoded weights."""
    made = Segment("int4_g32", 0.0)
    made.layers = nn.ModuleList(Wrapped(format, layer, plain=plain) for layer in made.layers)
    for layer in made.layers:  # so large that results are near 1
        layer.a.data *= 1 / layer.gain / layer.a.float().norm(dim=1).mean().item()
    return made


@pytest.mark.parametrize("format", NAMES)
def test_a_training_step(format: str) -> None:
    """All four layers are read, and values and gradients are as near to float64's as those of eager
    mode on the decoded weights."""
    packed, plain = (segment(format, plain=each) for each in (False, True))
    eager = step(plain, tokens(), module=plain)
    exact = step(plain, tokens(torch.float64), module=plain)
    result = compile_step(
        packed,
        tokens(),
        options={"qfuse.thresholds": THRESHOLDS},
        context=no_codegen(),
        fullgraph=True,
    )
    assert result.applied == {"unwrap_weights": 4, **CASES["bf16"][2]}
    theirs, true = ({"output": y, **gradients} for y, gradients in (eager, exact))
    ours = {"output": result.output, **result.gradients}
    assert len(ours) == 10
    assert ours.keys() == theirs.keys()
    for what, found in ours.items():
        error = relative_error(theirs[what], true[what])
        assert relative_error(found, true[what]) <= BOUNDS["bf16"] * error, what
