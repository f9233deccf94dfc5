"""Compiles, breaks once, then waits to be interrupted."""

import time

import torch


@torch.compile(backend="eager")
def forward(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x + 1


forward(torch.ones(3))
print("waiting", flush=True)
for _ in range(600):
    time.sleep(0.1)
