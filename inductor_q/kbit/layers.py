"""Which linear layers of a model are quantized, and how a layer is put in place of another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase

from torch import nn

from inductor_q.exc import UnknownLayer


def linear_layers(model: nn.Module, skip: Collection[str] = ()) -> dict[str, nn.Linear]:
    """The layers to quantize, by name: every `nn.Linear` itself, not its subclasses.

    Left out are what `skip` matches, layers whose weight is tied to another parameter, which would
    be stored twice, and the matrices of PEFT's adapters.

    Args:
        skip: shell patterns of whole names or of last components: "lm_head", "*.layers.0.*".

    Raises:
        UnknownLayer: a pattern matches nothing.
    """
    found = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    for pattern in skip:
        if not any(_matches(name, pattern) for name in found):
            raise UnknownLayer(name=pattern, known=tuple(found), source="skip")
    owners = Counter(id(p) for m in set(model.modules()) for p in m._parameters.values())
    return {
        name: layer
        for name, layer in found.items()
        if not any(_matches(name, pattern) for pattern in skip)
        and owners[id(layer.weight)] == 1
        and ".lora_" not in f".{name}"
    }


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)


def replace_layers(model: nn.Module, new: Mapping[str, nn.Module]) -> nn.Module:
    """Put each layer in the place of the one of that name, under all of its names.

    Returns the model, or the layer that replaces it when it is one itself.
    """
    by_old = {}
    for name, layer in new.items():
        old = model.get_submodule(name)
        by_old[id(old)] = layer.train(old.training)
    for parent, name, child in list(_edges(model)):
        if id(child) in by_old:
            setattr(parent, name, by_old[id(child)])
    return new.get("", model)


def _edges(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                yield parent, name, child
