"""Let the router logits of a mixture of experts be collected in a whole graph.

TRL asks a mixture for its auxiliary loss, and transformers then collects the logits by hooks on the
routers, which append to a list of the caller's. It installs the hooks under a lock in the first
forward, and Dynamo traces no lock: here they are installed before. In a checkpointed layer Dynamo
also has to be told that nobody needs the list to be filled again in backward
(`skip_fwd_side_effects_in_bwd_under_checkpoint`). Where each layer is compiled by itself, the list
is made outside of its graph, which Dynamo cannot reach: such layers stay in eager mode.
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
    decoders = [module.get_decoder() for module in modules if hasattr(module, "get_decoder")]
    asked = [
        decoder
        for decoder in decoders
        if getattr(getattr(decoder, "config", None), "output_router_logits", False)
    ]
    for decoder in asked:
        install(decoder)
    return bool(asked)
