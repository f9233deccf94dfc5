"""A layer of bitsandbytes in a graph, whose weight is a plain parameter, as FSDP2 leaves it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from inductor_q import report, testing
from inductor_q.backend import qfuse
from inductor_q.capture.packed import packed_tensors
from tests.support.compiling import SMALL, no_codegen


def gathered(layer: Any) -> nn.Parameter:
    """Return what FSDP2 puts into the place of a weight: its bytes alone."""
    return nn.Parameter(layer.weight.data.as_subclass(torch.Tensor), requires_grad=False)


@pytest.mark.parametrize("nested", [True, False])
def test_a_gathered_weight_is_read_in_one_graph(nested: bool) -> None:
    model: Any = testing.lora_linear(64, 64, nested=nested, quant_storage=torch.bfloat16)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    base = model.proj.base_layer
    expected, weight = model(x), gathered(base)
    torch._dynamo.reset()
    model.compile(backend=qfuse, options=SMALL)
    with testing.CompileTrace() as trace, no_codegen():
        for _ in range(2):  # FSDP2 takes the parameter away, and puts the same one back
            base._parameters["weight"] = None
            base._parameters["weight"] = weight
            assert testing.relative_error(model(x), expected) < 1e-2
    assert (trace.graphs, trace.breaks, trace.recompiles) == (1, [], [])
    found = report(model)
    assert (list(found.layers), found.fused) == (["proj"], 1)


def test_a_weight_that_no_state_stands_beside_is_none() -> None:
    linear: Any = testing.quantized_linear(torch.randn(64, 64), quant_storage=torch.bfloat16)
    linear._parameters["weight"] = gathered(linear)
    assert [name for name, _ in packed_tensors(linear)] == ["weight"]
    linear.quant_state = None
    assert not list(packed_tensors(linear))
