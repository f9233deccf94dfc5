"""Compiles, breaks once, then raises."""

import torch


@torch.compile(backend="eager")
def forward(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x + 1


forward(torch.ones(3))
print("before", flush=True)
raise RuntimeError("the loss is nan")
