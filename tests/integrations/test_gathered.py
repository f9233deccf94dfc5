"""Gathered weights have their states before a layer is called, so a checkpointed graph is whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from inductor_q import report, testing
from inductor_q.backend import qfuse
from inductor_q.integrations.gathered import note_states
from tests.support.compiling import SMALL, no_codegen


class Segment(nn.Module):
    """Run a layer twice, as gradient checkpointing does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = testing.lora_linear(64, 64, quant_storage=torch.bfloat16)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layer.proj, x, use_reentrant=False)


def test_checkpointing_is_one_graph() -> None:
    segment = Segment()
    x = torch.randn(4, 64, dtype=torch.bfloat16, requires_grad=True)
    expected = segment(x)
    linear = segment.layer.proj.base_layer
    plain = linear.weight.data.as_subclass(Tensor)
    linear._parameters["weight"] = nn.Parameter(plain, requires_grad=False)
    note_states(segment)
    note_states(segment)
    assert len(segment._forward_pre_hooks) == 1
    torch._dynamo.reset()
    segment.compile(backend=qfuse, options=SMALL)
    with testing.CompileTrace() as trace, no_codegen():
        for _ in range(2):
            output = segment(x)
            output.sum().backward()
            assert testing.relative_error(output, expected) < 1e-2
    assert (trace.graphs, trace.breaks, trace.recompiles) == (1, [], [])
    assert report(segment).fused == 1
