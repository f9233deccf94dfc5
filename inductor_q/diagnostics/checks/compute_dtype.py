"""Find bitsandbytes 4-bit layers that compute in float32, their default where nobody chose."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from inductor_q.diagnostics.checks.finding import Finding
from inductor_q.diagnostics.checks.modules import instances, several

NAME = "compute_dtype"
REMEDY = (
    "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)"
    "  # of a loaded model: layer.compute_dtype = torch.bfloat16 on each of them"
)


def check(model: nn.Module) -> Iterator[Finding]:
    """`compute_dtype` float32 casts activations up and runs every product without tensor cores."""
    layers = list(instances(model, "bitsandbytes.nn", "Linear4bit"))
    if not layers:
        yield Finding(NAME, "ok", "no 4-bit layer of bitsandbytes")
        return
    # None until the first input, whose dtype the layer then takes for itself.
    slow = [path for path, layer in layers if layer.compute_dtype == torch.float32]
    if slow:
        found = f"{several(slow, '4-bit layer')} compute in float32"
        yield Finding(NAME, "warn", found, REMEDY)
    else:
        dtypes = {str(layer.compute_dtype).removeprefix("torch.") for _, layer in layers}
        yield Finding(NAME, "ok", ", ".join(sorted(dtypes)))
