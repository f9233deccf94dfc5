"""Its compiler fails, suppress_errors hides it: the layer runs in eager mode, and the script ends
well."""

from typing import Any

import torch

from inductor_q import testing

torch._dynamo.config.suppress_errors = True


def no_kernel(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    raise NotImplementedError("no kernel for this device")


layer = torch.nn.Sequential(testing.quantized_linear(torch.ones(32, 64, dtype=torch.bfloat16)))


@torch.compile(backend=no_kernel)
def step(x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = layer(x).tanh()
    return y


for _ in range(3):
    y = step(torch.ones(8, 64, dtype=torch.bfloat16))
print("ended well", tuple(y.shape))
