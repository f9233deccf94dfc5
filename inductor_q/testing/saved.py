"""Count what autograd keeps for backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


def static_storages(*modules: nn.Module) -> set[int]:
    """Return the data pointers of everything the modules own for good.

    These are parameters, buffers and bitsandbytes' quantization states.
    """
    owned: set[int] = set()

    def add(value: object) -> None:
        if isinstance(value, torch.Tensor):
            owned.add(value.untyped_storage().data_ptr())
        elif hasattr(value, "absmax"):  # bitsandbytes QuantState, nested once
            for inner in vars(value).values():
                add(inner)

    for module in modules:
        for tensor in [*module.parameters(), *module.buffers()]:
            add(tensor)
            add(getattr(tensor, "quant_state", None))
    return owned


@dataclass
class SavedBytes:
    """Count what a forward keeps for its backward, each storage once.

    What the model owns anyway is left out.
    """

    total: int = 0
    tensors: list[tuple[tuple[int, ...], torch.dtype]] = field(default_factory=list)


def count_saved_bytes(fn: Callable[[], Any], *modules: nn.Module) -> SavedBytes:
    """Run ``fn`` (a forward, eager or compiled) and count the bytes it saves for backward.

    Storages that ``modules`` own are not counted. A compiled callable must have been compiled
    before: hooks present while Dynamo traces would become part of the graph.
    """
    owned = static_storages(*modules)
    # Keeps the storages alive: a freed pointer could come back as another tensor's.
    seen: dict[int, torch.UntypedStorage] = {}
    saved = SavedBytes()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        if pointer not in owned and pointer not in seen:
            seen[pointer] = storage
            saved.total += storage.nbytes()
            saved.tensors.append((tuple(tensor.shape), tensor.dtype))
        # Never the tensor itself: a node that saves its own output would own itself, for ever.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = fn()
    del result
    return saved
