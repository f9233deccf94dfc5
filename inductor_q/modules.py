"""List the modules of a model quickly, for what looks at them in every step.

A model with adapters has thousands of modules: seven layers of a block become some eighty.
"""

from __future__ import annotations

from torch import nn


def modules_of(model: nn.Module) -> list[nn.Module]:
    """List each module once, in the order of `model.modules()`, which also makes names, and passes
    each module through a generator of every module around it."""
    found: list[nn.Module] = []
    met: set[int] = set()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in met:
            met.add(id(module))
            found.append(module)
            if parts := module._modules:
                waiting += [part for part in reversed(parts.values()) if part is not None]
    return found
