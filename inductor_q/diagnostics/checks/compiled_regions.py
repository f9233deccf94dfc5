"""Check submodules that are compiled one by one against the recompile limit they share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from types import CodeType

from torch import nn

from inductor_q.diagnostics.checks.finding import Finding
from inductor_q.diagnostics.checks.modules import compiled_alone

NAME = "compiled_regions"


def check(model: nn.Module) -> Iterator[Finding]:
    """One code object is compiled once for each set of shapes; past the limit it runs eagerly.

    Layers that are alike share one graph, since Dynamo lifts parameters to inputs; those of another
    width, dtype or kind do not.
    """
    from torch._dynamo import config

    kinds: defaultdict[CodeType, set[Hashable]] = defaultdict(set)
    names: dict[CodeType, str] = {}
    for _, region in compiled_alone(model):
        code = getattr(type(region).forward, "__code__", None)
        if code is not None:
            kinds[code].add(_signature(region))
            names[code] = f"{type(region).__name__}.forward"
    if not kinds:
        yield Finding(NAME, "ok", "no submodule is compiled on its own")
        return
    code, most = max(kinds.items(), key=lambda item: len(item[1]))
    found = f"{len(most)} distinct sets of shapes go through {names[code]}"
    if len(most) > config.recompile_limit:
        remedy = f"torch._dynamo.config.recompile_limit = {2 * len(most)}"
        found += f"; the recompile limit is {config.recompile_limit}, the others run eagerly"
        yield Finding(NAME, "fail", found, remedy)
    else:
        yield Finding(NAME, "ok", found)


def _signature(region: nn.Module) -> Hashable:
    """Return what guards check: classes, and each tensor's shape, dtype and whether it trains."""
    tensors = (*region.named_parameters(), *region.named_buffers())
    return (
        tuple((path, type(module)) for path, module in region.named_modules()),
        tuple((name, t.shape, t.dtype, t.requires_grad) for name, t in tensors),
    )
