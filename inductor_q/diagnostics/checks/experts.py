"""Check how transformers computes fused experts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from inductor_q.capture import expert_blocks
from inductor_q.diagnostics.checks.finding import Finding
from inductor_q.diagnostics.checks.modules import is_training, several, tidy

NAME = "experts"
REMEDY = 'model.set_experts_implementation("grouped_mm")'
TAKE_OVER = "inductor_q.experts.use_qfuse(model)"
LOAD = "inductor_q.load_checkpoint(model, folder)  # made under inductor_q.kbit.meta_parameters()"


def check(model: nn.Module) -> Iterator[Finding]:
    """Experts "eager" loop over data, "batched_mm" gathers a copy of the weight for each token.

    Those in a packed layer of a library's own are computed by its kernel, which passes cannot read.
    """
    yield from _packed_alone(model)
    layers: dict[str, list[str]] = {}
    for path, submodule in model.named_modules():
        implementation = _implementation(submodule)
        if implementation:
            layers.setdefault(implementation, []).append(tidy(path))
    if not layers and not expert_blocks(model):
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


def _packed_alone(model: nn.Module) -> Iterator[Finding]:
    """Tell layers that `take_over` of `inductor_q.experts` can read from those that it cannot."""
    found: dict[tuple[str, str], list[str]] = {}
    for block in expert_blocks(model):
        path = tidy(f"{block.name}.{block.layer}")
        found.setdefault((block.kind, block.reason), []).append(path)
    for (kind, reason), paths in found.items():
        what = f"{kind} in {several(paths, 'layer')}, left to its library"
        what += f": {reason}" if reason else ""
        yield Finding(NAME, "warn", what, LOAD if reason else TAKE_OVER)


def _implementation(submodule: nn.Module) -> str:
    """Return what the config says, for a module that holds fused weights of several experts."""
    # transformers' decorator `use_experts_implementation` leaves this on the class.
    if not hasattr(type(submodule), "_apply_gate"):
        return ""
    config = getattr(submodule, "config", None)
    return str(getattr(config, "_experts_implementation", None) or "")
