"""Three ways to ask a tensor for its value inside a compiled function."""

import torch


def normalize(x: torch.Tensor) -> torch.Tensor:
    if x.abs().max() > 1:
        x = x / x.abs().max()
    return x


def scale(x: torch.Tensor) -> torch.Tensor:
    factor = x.sum().item()
    return x * factor


@torch.compile(backend="eager")
def forward(x: torch.Tensor) -> torch.Tensor:
    y = normalize(x.cos() * 3)
    y = scale(y.sin())
    return y + 1


for _ in range(3):
    forward(torch.ones(4))
print("done")
