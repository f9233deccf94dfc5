"""The hooks with which bitsandbytes keeps decoded weights while the module around them runs."""

from __future__ import annotations

from typing import Any

from torch import nn

_NAMES = frozenset({"_enable_parametrization_cache", "_disable_parametrization_cache"})


def caching_hooks(module: nn.Module) -> list[tuple[dict[int, Any], int]]:
    """List such hooks of a module, each as the dictionary that holds it and its key there.

    `replace_parameter_4bit` registers two for each parameter that it packs: one before and one
    after the module's forward, which switch the cache of torch's parametrize on and off.
    """
    held: tuple[Any, ...] = (module._forward_pre_hooks, module._forward_hooks)
    return [
        (hooks, key)
        for hooks in held
        for key, hook in hooks.items()
        if getattr(hook, "__name__", "") in _NAMES
    ]
