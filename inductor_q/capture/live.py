"""Find the quantized layers that are alive in this process, whoever compiled them, if anybody did.

The garbage collector finds them, so a model local to a function of the target counts too. Only
types and plain attributes are looked at: nothing of a module is run.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from inductor_q.capture import packed_weight
from inductor_q.capture.library import Packed
from inductor_q.capture.packed import MAIN_NAMES, packed_tensors

NOT_KNOWN = "nothing here knows how this library packs"


@dataclass(frozen=True)
class Quantized:
    """Name one packed weight: the module that owns it, by path from its root, and how it is packed.

    `format` is the library's name for how it is packed, `layout` ours for the same, or "" where
    nothing here reads it, for `reason`. `nbytes` are those that store it on a `device`, by type.
    `tree` distinguishes the module trees of a process.
    """

    module: str
    kind: str
    format: str
    shape: tuple[int, ...] = ()
    tree: int = 0
    library: str = ""
    layout: str = ""
    reason: str = ""
    nbytes: int = 0
    device: str = ""


def quantized_layers() -> tuple[Quantized, ...]:
    """Find every packed weight of every live module; paths count from the root of its tree."""
    return layers_of(*roots())


def roots() -> list[nn.Module]:
    """Find the live modules that are in no other live module, the largest tree first."""
    objects = gc.get_objects()  # millions: a test of each type once, not of each object
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, nn.Module)}
    modules = [obj for obj in objects if type(obj) in kinds]
    inner = {id(child) for m in modules for child in vars(m).get("_modules", {}).values()}
    roots = [m for m in modules if id(m) not in inner and "_modules" in vars(m)]
    return sorted(roots, key=lambda m: -len(vars(m)["_modules"]))


def parameters() -> Iterator[nn.Parameter]:
    """Find the parameters of every live module."""
    return itertools.chain.from_iterable(root.parameters() for root in roots())


def layers_of(*roots: nn.Module) -> tuple[Quantized, ...]:
    """Find every packed weight of the given modules; paths count from each of them."""
    found: dict[int, Quantized] = {}
    for root in roots:
        for path, module in root.named_modules():
            for name, tensor in packed_tensors(module):
                if id(tensor) not in found:
                    held = packed_weight(module, name) or _unknown(tensor, type(module))
                    found[id(tensor)] = Quantized(
                        module=module_path(path, name),
                        kind=held.kind,
                        format=held.format,
                        shape=held.shape,
                        tree=id(root),
                        library=held.library,
                        layout=held.layout,
                        reason=held.reason,
                        nbytes=sum(part.nbytes for part in held.parts),
                        device=tensor.device.type,
                    )
    return tuple(dict.fromkeys(found.values()))


def module_path(path: str, name: str = "") -> str:
    """Return the path of a layer as reports have it.

    That is without PEFT's `base_layer` and torch's `parametrizations`, and with the parameter's
    name where a module packs more than `weight`.
    """
    parts = [p for p in path.split(".") if p not in ("base_layer", "_orig_mod", "")]
    if "parametrizations" in parts:
        parts.remove("parametrizations")
        name = ""
    if name and (not parts or name not in MAIN_NAMES):
        parts.append(name)
    return ".".join(parts)


def _unknown(tensor: torch.Tensor, owner: type) -> Packed:
    """Describe a packed weight of a library that is not listed: the one that has the class of the
    tensor, or else of the module."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter)
    name = str(tensor.dtype).removeprefix("torch.") if is_plain else type(tensor).__name__
    library = (owner if is_plain else type(tensor)).__module__.partition(".")[0]
    return Packed(name, tuple(tensor.shape), reason=NOT_KNOWN, library=library)
