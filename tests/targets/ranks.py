"""Two ranks over gloo, each compiling the same step; rank 1 sees one more shape."""

import sys

import torch
import torch.distributed as dist


@torch.compile(backend="eager", dynamic=False)
def step(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch._dynamo.graph_break()
    return y.sum()


dist.init_process_group("gloo")
rank = dist.get_rank()
for length in (4, 6) if rank else (4,):
    total = step(torch.ones(length))
    dist.all_reduce(total) if length == 4 else None
print(f"rank {rank} of {dist.get_world_size()} argv {sys.argv[1:]}", flush=True)
dist.destroy_process_group()
