"""Breaks inside of a `for` and a `try`: the frame is given up, and torch's counters say nothing."""

import torch
from torch._dynamo.utils import counters


@torch.compile(backend="eager")
def in_for(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = x + 1
        torch._dynamo.graph_break()
    return x.cos()


@torch.compile(backend="eager")
def in_try(x: torch.Tensor) -> torch.Tensor:
    try:
        x = x * x.sum().item()
    except ValueError:
        x = x + 1
    return x.cos()


for _ in range(2):
    in_for(torch.ones(4))
    in_try(torch.ones(4))
print("counted by torch:", sum(counters["graph_break"].values()))
