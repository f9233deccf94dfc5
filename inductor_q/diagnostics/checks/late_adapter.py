"""Find adapters that were added, or switched to, after the model had been compiled."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch
from torch import nn

from inductor_q.diagnostics.checks.finding import Finding
from inductor_q.diagnostics.checks.modules import instances

NAME = "late_adapter"
REMEDY = (
    "get_peft_model / add_adapter / set_adapter first, then torch.compile(model); or "
    "inductor_q.compile(model)"
)


def check(model: nn.Module) -> Iterator[Finding]:
    """Dynamo guards on what a compiled graph used: an adapter in no guard is in no graph.

    The next call compiles everything again, and counts against the recompile limit. Nothing can be
    said before the first compiled call, and nothing is wrong then.
    """
    guards = [text for code in _forwards(model) for text in _guards(code)]
    if not guards:
        yield Finding(NAME, "ok", "nothing was compiled yet")
        return
    late = sorted(a for a in _active(model) if not any(f"['{a}']" in text for text in guards))
    if late:
        found = f"{', '.join(late)}: active, and in no graph compiled so far"
        yield Finding(NAME, "warn", found, REMEDY)
    else:
        yield Finding(NAME, "ok", "every active adapter is in a compiled graph")


def _active(model: nn.Module) -> set[str]:
    layers = instances(model, "peft.tuners.tuners_utils", "BaseTunerLayer")
    return {
        name
        for _, layer in layers
        if not layer.disable_adapters and not layer.merged
        for name in layer.active_adapters
    }


def _forwards(model: nn.Module) -> set[CodeType]:
    """Return the code of each forward, under decorators, and of each state of the adapters, that
    Dynamo may have compiled."""
    from inductor_q.integrations.states import state_codes  # the compiler needs a cache folder

    found: set[CodeType] = set()
    for kind in {type(module) for module in model.modules()}:
        function: Any = kind.forward
        while function is not None:
            if code := getattr(function, "__code__", None):
                found.add(code)
            function = getattr(function, "__wrapped__", None)
    return found | set(state_codes(model))


def _guards(code: CodeType) -> Iterator[str]:
    """Return the guards of each graph that was compiled for `code`, as text with their sources."""
    for entry in torch._dynamo.eval_frame._debug_get_cache_entry_list(code):
        yield str(entry.guard_manager)
