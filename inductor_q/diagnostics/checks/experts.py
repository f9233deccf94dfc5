"""Check how transformers computes fused experts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from inductor_q.diagnostics.checks.finding import Finding
from inductor_q.diagnostics.checks.modules import is_training, several, tidy

NAME = "experts"
REMEDY = 'model.set_experts_implementation("grouped_mm")'


def check(model: nn.Module) -> Iterator[Finding]:
    """Experts "eager" loop over data, "batched_mm" gathers a copy of the weight for each token."""
    layers: dict[str, list[str]] = {}
    for path, submodule in model.named_modules():
        implementation = _implementation(submodule)
        if implementation:
            layers.setdefault(implementation, []).append(tidy(path))
    if not layers:
        yield Finding(NAME, "ok", "none")
    for implementation, paths in sorted(layers.items()):
        found = f'"{implementation}" in {several(paths, "layer")}'
        if implementation == "eager":
            found += ": a loop over the experts that were hit, which breaks the graph"
            yield Finding(NAME, "warn", found, REMEDY)
        elif implementation == "batched_mm" and is_training(model):
            found += ": a copy of the expert's weight for each token is kept for backward"
            yield Finding(NAME, "warn", found, REMEDY)
        else:
            yield Finding(NAME, "ok", found)


def _implementation(submodule: nn.Module) -> str:
    """Return what the config says, for a module that holds fused weights of several experts."""
    # transformers' decorator `use_experts_implementation` leaves this on the class.
    if not hasattr(type(submodule), "_apply_gate"):
        return ""
    config = getattr(submodule, "config", None)
    return str(getattr(config, "_experts_implementation", None) or "")
