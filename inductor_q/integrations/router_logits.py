"""Let the router logits of a mixture of experts be collected in a whole graph.

TRL asks a mixture for its auxiliary loss, and transformers then collects the logits by hooks on the
routers, which append to a list of the caller's. It installs the hooks under a lock in the first
forward, and Dynamo traces no lock: here they are installed before. In a checkpointed layer Dynamo
also has to be told that nobody needs the list to be filled again in backward.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def prepare_router_logits(model: nn.Module) -> bool:
    """Install transformers' hooks where the configuration of a model asks for router logits.

    Return whether it does. Versions of transformers without such hooks are left alone.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    install: Any = getattr(capturing, "maybe_install_capturing_hooks", None)
    modules: list[Any] = [] if install is None else list(model.modules())
    found = [module for module in modules if _asks(module)]
    for module in found:
        install(module.get_decoder())
    return bool(found)


def _asks(module: Any) -> bool:
    """Whether a module is a model of transformers with a decoder and such a configuration."""
    config: Any = getattr(module, "config", None)
    if not hasattr(module, "get_decoder") or not hasattr(config, "get_text_config"):
        return False
    return bool(getattr(config.get_text_config(), "output_router_logits", False))
