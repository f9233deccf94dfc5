"""Search a model for the modules that a check is about, without importing a library for it.

A model that holds a layer of a library has imported that library, so a class that `sys.modules`
does not have is in no model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

WRAPPERS = ("_orig_mod", "base_layer")  # of torch.compile and PEFT: not in the user's own names


def instances(model: nn.Module, module: str, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, submodule) of every instance of the class `name` of the imported `module`."""
    wanted = getattr(sys.modules.get(module), name, None)
    if isinstance(wanted, type):
        for path, submodule in model.named_modules():
            if isinstance(submodule, wanted):
                yield tidy(path), submodule


def compiled_alone(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, submodule) of every module below the top that has a compiled call of its own."""
    from torch._dynamo.eval_frame import OptimizedModule

    for path, submodule in model.named_modules():
        if submodule is model:
            continue
        if isinstance(submodule, OptimizedModule):
            yield tidy(path), submodule._orig_mod
            continue
        call = submodule._compiled_call_impl
        if getattr(call, "before", call) is not None:  # of compile_decoding
            yield tidy(path), submodule


def tidy(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def several(paths: Sequence[str], what: str) -> str:
    """Say how many there are, and the first: "14 4-bit layers (model.layers.0.q_proj, ...)"."""
    first = paths[0] or "the model itself"
    return f"{len(paths)} {what}{'s' if len(paths) > 1 else ''} ({first}" + (
        ", ...)" if len(paths) > 1 else ")"
    )


def is_training(model: nn.Module) -> bool:
    """Return whether a model is in training mode, with something to train."""
    return model.training and any(p.requires_grad for p in model.parameters())
