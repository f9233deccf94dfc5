"""Find 4-bit layers whose bias has another dtype than they compute in: the first call casts it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from inductor_q.diagnostics.checks.finding import Finding
from inductor_q.diagnostics.checks.modules import instances, several

NAME = "bias_dtype"
REMEDY = (
    "for layer in model.modules():\n"
    "    if hasattr(layer, 'compute_dtype') and layer.bias is not None:\n"
    "        layer.bias.data = layer.bias.data.to(layer.compute_dtype)"
)


def check(model: nn.Module) -> Iterator[Finding]:
    """bitsandbytes casts such a bias in place, which cannot be traced: nothing is compiled then."""
    layers = instances(model, "bitsandbytes.nn", "Linear4bit")
    other = [
        path
        for path, layer in layers
        if layer.bias is not None and layer.compute_dtype not in (None, layer.bias.dtype)
    ]
    if other:
        what = f"{several(other, '4-bit layer')}: the first call casts the bias in place"
        yield Finding(NAME, "warn", what, REMEDY)
    else:
        yield Finding(NAME, "ok", "no bias to cast")
