"""Recognize a packed weight, whoever packed it: one rule for all that look for one.

A weight counts as packed by what it is, not by whether a pass knows it: bitsandbytes' parameters,
tensor subclasses that hold codes (torchao, quanto), and plain codes held by a module (GPTQ, AWQ,
HQQ, fp8, ours). Only types, dtypes and names are looked at; nothing of a module is run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from inductor_q.capture import LIBRARIES

#: Classes of parameters that are packed whatever their dtype says.
_PARAMETERS = frozenset(name for library in LIBRARIES for name in library.parameters)

#: The names that libraries give to the weight of a module that has one.
MAIN_NAMES = ("weight", "original", "qweight", "W_q", "weight_packed")

#: Dtypes in which a matrix that is called a weight is a packed one.
_ONLY_CODES = (
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)

_SCALES = re.compile(r"(^|_)(scales?|scale_inv|absmax)$")
_NO_WEIGHT = re.compile(r"(^|_)(scales?|scale_inv|absmax|q?zeros?|zero_points?)$")


def holds_codes(tensor: Tensor) -> bool:
    """Whether a tensor holds integers or floats of at most 8 bits, which no arithmetic of a model
    reads as they are. Positions and indices are such tensors too."""
    dtype = tensor.dtype
    if tensor.dim() == 0 or dtype is torch.bool or dtype.is_complex:
        return False
    return not dtype.is_floating_point or dtype.itemsize < 2


def is_packed_weight(
    tensor: Tensor, name: str, *, is_parameter: bool, beside: Collection[str] = ()
) -> bool:
    """Whether a tensor that a module holds is a packed weight.

    Codes in words of up to 32 bits are one where a scale stands beside them. A matrix of them is
    one in any case where it is a parameter, which integers have no other reason to be, and where it
    is int8 or fp8 and called a weight. Positions and indices, which are 64-bit integers, masks and
    caches, and packed scales and zero points are none. The weight of a module that keeps a
    `quant_state` is one in any dtype: FSDP2 gathers it as plain 16-bit numbers, which hold codes.

    Args:
        name: the name that it has in the module.
        is_parameter: whether it is a parameter, not a buffer.
        beside: the names of all tensors that the same module holds, and "quant_state", if any.
    """
    tensor = _on_this_rank(tensor)
    if type(tensor).__name__ in _PARAMETERS or wraps_codes(tensor):
        return True
    if "quant_state" in beside and name in MAIN_NAMES:
        return True
    if not holds_codes(tensor) or tensor.dtype.itemsize > 4 or _NO_WEIGHT.search(name):
        return False
    is_named = name in MAIN_NAMES
    if tensor.dim() > 1 and (is_parameter or (is_named and tensor.dtype in _ONLY_CODES)):
        return True
    has_scale = any(map(_SCALES.search, beside))
    return has_scale and (tensor.dim() > 1 or is_named)


def packed_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the packed weights that `module` itself holds, by name."""
    held = dict(_held(module))
    states = {"quant_state"} if vars(module).get("quant_state") is not None else set()
    for name, tensor in held.items():
        is_parameter = name in module._parameters
        if is_packed_weight(tensor, name, is_parameter=is_parameter, beside={*held, *states}):
            yield name, tensor


def _held(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for store in ("_parameters", "_buffers"):
        for name, tensor in vars(module).get(store, {}).items():
            if isinstance(tensor, Tensor):
                yield name, tensor


def _inner_tensors(tensor: Tensor) -> list[Tensor]:
    """List the tensors that a traceable subclass is made of; a plain tensor has none."""
    flatten: Any = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None:
        return []
    inner = (getattr(tensor, name) for name in flatten(tensor)[0])
    return [t for t in inner if isinstance(t, Tensor)]


def _on_this_rank(tensor: Tensor) -> Tensor:
    """Return the part of a sharded tensor (DTensor) that this rank holds, by which it is judged: a
    sharded scale is no weight."""
    while type(tensor).__name__ == "DTensor":
        (tensor,) = _inner_tensors(tensor)
    return tensor


def wraps_codes(tensor: Tensor) -> bool:
    """Whether a part of a subclass holds codes: offsets of a nested tensor, which are long integers
    in one dimension, do not."""
    return any(
        wraps_codes(part) or (holds_codes(part) and (part.dtype.itemsize == 1 or part.dim() > 1))
        for part in _inner_tensors(_on_this_rank(tensor))
    )
