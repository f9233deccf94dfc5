"""What a packed weight looks like, whoever packed it: one rule for all that look for one.

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

from inductor_q.formats import FORMATS

#: bitsandbytes' parameters, known by name so that it need not be imported. What they store may look
#: like values: `bnb_4bit_quant_storage` views packed bytes as bf16.
_BNB_PARAMETERS = ("Params4bit", "Int8Params")

#: What libraries call the weight of a module that has one, where it is not "weight".
MAIN_NAMES = ("weight", "original", "qweight", "W_q", "weight_packed", "packed")

_SCALES = re.compile(r"(^|_)(scales?|scale_inv|absmax)$")
_ZEROS = re.compile(r"(^|_)(q?zeros?|zero_points?)$")


def holds_codes(tensor: Tensor) -> bool:
    """Whether a tensor has a dtype that no arithmetic of a model reads as it is: integers, or
    floats of 8 bits and fewer. Positions and indices have it too."""
    dtype = tensor.dtype
    if tensor.dim() == 0 or dtype is torch.bool or dtype.is_complex:
        return False
    return not dtype.is_floating_point or dtype.itemsize < 2


def is_packed_weight(
    tensor: Tensor, name: str, *, is_parameter: bool, beside: Collection[str] = ()
) -> bool:
    """Whether a tensor that a module holds is a packed weight.

    Codes in two or more dimensions, in words of up to 32 bits, are one where they are a parameter,
    which integers have no other reason to be, or where a scale stands beside them. Positions and
    indices, which are 64-bit integers, masks, and packed zero points are none.

    Args:
        name: what the module calls it.
        is_parameter: a parameter rather than a buffer.
        beside: the names of the floating tensors that the same module holds.
    """
    if type(tensor).__name__ in _BNB_PARAMETERS:
        return True
    if _inner_tensors(tensor):
        return _wraps_codes(tensor)
    if not holds_codes(tensor) or tensor.dim() < 2 or tensor.dtype.itemsize > 4:
        return False
    return not _ZEROS.search(name) and (is_parameter or any(map(_SCALES.search, beside)))


def packed_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The packed weights that `module` itself holds, by name."""
    own = getattr(module, "format", None)
    if isinstance(own, str) and own in FORMATS:  # a layer of ours says what it holds
        name = FORMATS[own].operands[0]
        held = dict(_held(module))
        if name in held:
            yield name, held[name]
        return
    beside = [name for name, tensor in _held(module) if tensor.dtype.is_floating_point]
    for name, tensor in _held(module):
        is_parameter = name in module._parameters
        if is_packed_weight(tensor, name, is_parameter=is_parameter, beside=beside):
            yield name, tensor


def _held(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for store in ("_parameters", "_buffers"):
        for name, tensor in vars(module).get(store, {}).items():
            if isinstance(tensor, Tensor):
                yield name, tensor


def _inner_tensors(tensor: Tensor) -> list[Tensor]:
    """What a traceable tensor subclass is made of; empty for a plain tensor."""
    flatten: Any = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None:
        return []
    inner = (getattr(tensor, name) for name in flatten(tensor)[0])
    return [t for t in inner if isinstance(t, Tensor)]


def _wraps_codes(tensor: Tensor) -> bool:
    """Whether a part of a subclass holds codes: offsets of a nested tensor, which are long integers
    in one dimension, do not."""
    return any(
        _wraps_codes(part) or (holds_codes(part) and (part.dtype.itemsize == 1 or part.dim() > 1))
        for part in _inner_tensors(tensor)
    )
