"""Our own library: ops that read packed weights, and modules that hold k bits or experts."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import fx, nn

from inductor_q.capture.library import Decoded, Library, Linear, Packed, Stored, Weight
from inductor_q.formats import FORMATS
from inductor_q.formats.encode import ENCODED, encode


def _match(node: fx.Node) -> Linear | Decoded | None:
    if node.target is torch.ops.qfuse.dequantize.default:
        operands, name, shape, dtype = cast(Any, node.args)
        return Decoded(Weight(tuple(operands), name, tuple(shape)), dtype)
    if node.target is torch.ops.qfuse.linear.default:
        x, operands, name, shape, bias = cast(Any, (*node.args, None))[:5]
        return Linear(x, Weight(tuple(operands), name, tuple(shape)), bias)
    if node.target is torch.ops.qfuse.lora_linear.default:
        x, operands, name, shape, a, b, scaling, bias = cast(Any, (*node.args, None))[:8]
        weight = Weight(tuple(operands), name, tuple(shape))
        return Linear(x, weight, bias, tuple(zip(a, b, scaling, strict=True)))
    return None


def _packed(module: nn.Module, name: str) -> Packed | None:
    """Read `KBitLinear` and `ExpertStack`, which hold operands under the names of their format."""
    said = vars(module)
    fmt = FORMATS.get(said.get("format", ""))
    if fmt is None or name != fmt.operands[0]:
        return None
    shape = said.get("shape") or (said["out_features"], said["in_features"])
    read = partial(_read, module, fmt.name, tuple(shape))
    parts = tuple(getattr(module, operand) for operand in fmt.operands)
    return Packed(fmt.name, tuple(shape), read, layout=fmt.name, parts=parts)


def _read(module: nn.Module, format: str, shape: tuple[int, ...]) -> Stored:
    return Stored([getattr(module, name) for name in FORMATS[format].operands], format, [*shape])


OWN = Library(
    name="inductor_q",
    namespaces=("qfuse",),
    match=_match,
    packed=_packed,
    quantizers=dict.fromkeys(ENCODED, encode),
)
