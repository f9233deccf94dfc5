"""Keep a graph whole whose layers give hidden states, attention weights or router logits away.

transformers collects these by hooks on its layers, which append to a list of the caller's. (TRL
asks a mixture of experts for its router logits, of which it makes the auxiliary loss.) It installs
the hooks under a lock, in the first forward that is asked for them. Dynamo traces no lock, so they
are installed here, before that forward.

In a checkpointed layer Dynamo also has to be told that nobody needs the list to be filled again in
backward (`skip_fwd_side_effects_in_bwd_under_checkpoint`). Where each layer is compiled by itself,
the list is made outside of its graph, where Dynamo does not reach it: such layers stay in eager
mode for router logits, and break their graph for hidden states.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

#: What a call may ask for that hooks collect.
ASKED = ("output_hidden_states", "output_attentions", "output_router_logits")


def prepare_router_logits(model: nn.Module) -> bool:
    """Install transformers' hooks where the configuration of a model asks for router logits.

    Return whether it does. Versions of transformers without such hooks are left alone.
    """
    asked = [
        decoder
        for decoder in _decoders(model)
        if getattr(getattr(decoder, "config", None), "output_router_logits", False)
    ]
    for decoder in asked:
        _install(decoder)
    return bool(asked)


def prepare_asked(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """Install transformers' hooks where a call of the model with these arguments needs them.

    Return whether it does.
    """
    asked = any(given.get(name) for name in ASKED)
    for decoder in _decoders(model) if asked else ():
        _install(decoder)
    return asked


def _decoders(model: nn.Module) -> Iterator[Any]:
    if _installer() is not None:
        modules: list[Any] = [*model.modules()]
        yield from (each.get_decoder() for each in modules if hasattr(each, "get_decoder"))


def _install(decoder: Any) -> None:
    install: Any = _installer()
    install(decoder)  # nothing, if they are there


def _installer() -> Any:
    capturing = sys.modules.get("transformers.utils.output_capturing")
    return getattr(capturing, "maybe_install_capturing_hooks", None)
