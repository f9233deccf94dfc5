"""A quantized layer with an adapter, compiled with CUDA graphs in mind, on whatever there is; one
break before it."""

import torch

from inductor_q import testing

device = "cuda" if torch.cuda.is_available() else "cpu"
layer = testing.lora_linear(32, 64, adapter_dtype=torch.bfloat16, device=device)


@torch.compile(mode="reduce-overhead")
def step(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 1e6:
        x = x / 2
    y: torch.Tensor = layer(x)
    return y


step(torch.ones(16, 64, dtype=torch.bfloat16, device=device)).sum().backward()
print("one step")
