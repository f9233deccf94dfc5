"""The quantized layers that are alive in this process, whatever compiled them or did not.

Found through the garbage collector, so that a model local to a function of the target counts too.
Only types and plain attributes are looked at: nothing of a module is run.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_SMALL = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Quantized:
    """One packed weight: the module that owns it, by path from its root, and how it is packed.

    `tree` tells the module trees of a process apart.
    """

    module: str
    kind: str
    format: str
    shape: tuple[int, ...] = ()
    tree: int = 0


def quantized_layers() -> tuple[Quantized, ...]:
    """Every packed weight of every live module, a module tree's paths counted from its root."""
    found: dict[int, Quantized] = {}
    for root in _roots():
        for path, module in root.named_modules():
            for name, tensor in _tensors(module):
                packed = _packed(name, tensor, module)
                if packed is not None and id(tensor) not in found:
                    kind, form, shape = packed
                    layer = module_path(path, name)
                    found[id(tensor)] = Quantized(layer, kind, form, shape, id(root))
    return tuple(dict.fromkeys(found.values()))


def module_path(path: str, name: str = "") -> str:
    """The path of a layer as reports have it: without PEFT's `base_layer` and torch's
    `parametrizations`, with the parameter's name where a module packs more than `weight`."""
    parts = [p for p in path.split(".") if p not in ("base_layer", "_orig_mod", "")]
    if "parametrizations" in parts:
        parts.remove("parametrizations")
        name = ""
    if name and (not parts or name not in ("weight", "original")):
        parts.append(name)
    return ".".join(parts)


def _roots() -> list[nn.Module]:
    """The live modules that are in no other live module, the largest tree first."""
    objects = gc.get_objects()  # millions: a test of each type once, not of each object
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, nn.Module)}
    modules = [obj for obj in objects if type(obj) in kinds]
    inner = {id(child) for m in modules for child in vars(m).get("_modules", {}).values()}
    roots = [m for m in modules if id(m) not in inner and "_modules" in vars(m)]
    return sorted(roots, key=lambda m: -len(vars(m)["_modules"]))


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for store in ("_parameters", "_buffers"):
        for name, tensor in vars(module).get(store, {}).items():
            if isinstance(tensor, torch.Tensor):
                yield name, tensor


def _packed(
    name: str, tensor: torch.Tensor, module: nn.Module
) -> tuple[str, str, tuple[int, ...]] | None:
    """(kind, format, shape) of a packed weight; None for anything else."""
    kind = type(tensor)
    state: Any = getattr(tensor, "quant_state", None)
    if kind.__name__ == "Params4bit":
        shape = tuple(getattr(state, "shape", ()) or ())
        return _role(shape), str(getattr(tensor, "quant_type", "")), shape
    if kind.__name__ == "Int8Params":
        return "linear", "int8", tuple(tensor.shape)
    if kind.__module__.partition(".")[0] == "torchao":
        return _role(tuple(tensor.shape)), kind.__name__, tuple(tensor.shape)
    if not isinstance(tensor, nn.Parameter) or tensor.dtype not in _SMALL or tensor.dim() < 2:
        return None
    state = getattr(module, "__dict__", {}).get("quant_state") or _bnb_parametrization(module)
    if state is not None:  # bitsandbytes.nn.parametrize: packed weights of any module
        shape = tuple(state.shape)
        return _role(shape), str(state.quant_type), shape
    return _role(tuple(tensor.shape)), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _bnb_parametrization(module: nn.Module) -> Any:
    steps = vars(module).get("_modules", {}).values() if isinstance(module, nn.ModuleList) else ()
    return next((s.quant_state for s in steps if hasattr(s, "quant_state")), None)


def _role(shape: tuple[int, ...]) -> str:
    return "experts" if len(shape) > 2 else "linear"
