"""Find which linear layers of a model are quantized, make one, put one in another's place."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from inductor_q.capture.packed import packed_tensors
from inductor_q.exc import NothingToQuantize, UnknownLayer
from inductor_q.log import log

#: Parts of names that PEFT adds to those of the model below it.
_OF_PEFT = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")

#: Modules of an adapter: LoRA's matrices, copies that train, the encoder of p-tuning.
_ADAPTER = re.compile(r"^prompt_encoder\.|(^|\.)(lora_|modules_to_save\.)")


def linear_layers(model: nn.Module, skip: Collection[str] = ()) -> dict[str, nn.Linear]:
    """Return the layers to quantize, by name: every `nn.Linear` itself, not its subclasses.

    Some are left out: layers that `skip` matches; layers whose weight is tied to another parameter,
    which would be stored twice; layers whose weight is packed already; and with PEFT, which freezes
    the model below, the modules of adapters and whatever else trains.

    Args:
        skip: shell patterns of whole names or of last components: "lm_head", "*.layers.0.*". PEFT's
            parts of a name may be left out.

    Raises:
        UnknownLayer: a pattern matches nothing.
    """
    found = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    for pattern in skip:
        if not any(matches(name, pattern) for name in found):
            raise UnknownLayer(name=pattern, known=tuple(found), source="skip")
    has_peft = any(hasattr(m, "peft_config") for m in model.modules())
    owners = Counter(id(p) for m in set(model.modules()) for p in m._parameters.values())
    return {
        name: layer
        for name, layer in found.items()
        if not any(matches(name, pattern) for pattern in skip)
        and owners[id(layer.weight)] == 1
        and not _ADAPTER.search(name)
        and not (has_peft and layer.weight.requires_grad)
        and not any(packed_tensors(layer))
    }


def check_some(layers: Collection[str], model: nn.Module, *, told: bool = True) -> None:
    """Raise where there is no layer to quantize.

    Where there is one and `told` is set, warn of what is packed already and stays as it is.

    Raises:
        NothingToQuantize: there is none; the error says what the model has instead.
    """
    packed = {
        name or "the layer": _kind(module, tensor)
        for name, module in model.named_modules()
        for _, tensor in packed_tensors(module)
    }
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(packed.values()).items())
    some = ", ".join(list(packed)[:3]) + (", ..." if len(packed) > 3 else "")
    if layers:
        if packed and told:
            log.warning(f"left as they are, packed already: {kinds} ({some})")
        return
    linears = sum(type(m) is nn.Linear for m in model.modules())
    if packed:
        found = (
            f"it is packed already, {kinds} ({some}). Load the model in 16 bits, without a "
            "quantization config; inductor_q.kbit.dequantize_model makes ordinary layers of "
            "KBitLinear, at the values they were rounded to"
        )
    elif linears:
        found = (
            f"none of its nn.Linear layers ({linears}) is left: `skip` names them, they share "
            "their weight with another module, or they belong to an adapter or train beside it"
        )
    else:
        found = "it has no nn.Linear"
    raise NothingToQuantize(model=type(model).__name__, found=found)


def _kind(module: nn.Module, weight: Tensor) -> str:
    """Name a layer by its library's class; where torch's is the class, by that of its weight."""
    if type(module) is not nn.Linear:
        return type(module).__name__
    is_plain = type(weight) in (Tensor, nn.Parameter)
    return f"Linear of {weight.dtype if is_plain else type(weight).__name__}"


def matches(name: str, pattern: str) -> bool:
    """Whether a shell pattern fits one of a layer's names or its last part."""
    names = names_of(name)
    names |= {n.rpartition(".")[2] for n in names}
    return any(fnmatchcase(n, pattern) for n in names)


def names_of(name: str) -> set[str]:
    """Return the names by which a layer may be meant: with PEFT's parts and without."""
    plain = _OF_PEFT.sub("", name)
    return {name, *(plain.removeprefix(p) for p in ("", "base_model.", "base_model.model."))}


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


def linear_of(weight: Tensor, bias: nn.Parameter | None) -> nn.Linear:
    """Return a linear layer that holds a frozen weight and a bias, without copies."""
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.register_parameter("bias", bias)
    return linear


def _edges(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                yield parent, name, child
