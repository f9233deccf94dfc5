"""A function that compiles for each length, until the recompile limit ends it."""

import torch


@torch.compile(backend="eager", dynamic=False)
def attend(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.T).softmax(-1)


for length in range(2, 14):
    attend(torch.ones(length, 4))
print("twelve lengths")
