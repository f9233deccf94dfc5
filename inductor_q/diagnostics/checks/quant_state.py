"""Find 4-bit weights that cannot be decoded, since their state lacks a part."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from inductor_q.capture import damaged
from inductor_q.diagnostics.checks.finding import Finding
from inductor_q.diagnostics.checks.modules import several, tidy

NAME = "quant_state"


def check(model: nn.Module) -> Iterator[Finding]:
    """Neither eager mode nor a backend can call such a layer, and what its library raises there
    names neither the layer nor the part."""
    errors = [(tidy(path), error) for path, error in damaged(model)]
    if not errors:
        yield Finding(NAME, "ok", "no 4-bit state lacks a part")
        return
    layers, first = list(dict.fromkeys(path for path, _ in errors)), errors[0][1]
    found = f"{several(layers, 'damaged 4-bit layer')}: {first.what} should be {first.expected}"
    yield Finding(NAME, "fail", f"{found}, is {first.got}", first.remedy)
