"""The products of transformers' experts as they appear in a joint or inference graph.

`grouped_mm` is a grouped product of sorted rows and a stack, seen transposed or not; it is an op of
transformers' own in dtypes that torch's product does not compile for. `batched_mm` is a product of
each row with its own copy of an expert, gathered by `index`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from inductor_q.capture.calls import call
from inductor_q.kernels.calls import DENSE

aten = torch.ops.aten

DENSE_EXPERTS = "the experts are dense: torch's grouped product reads them as they are"
ADAPTED_EXPERTS = (
    "PEFT adds an adapter to the weights of all experts in each step: "
    "inductor_q.experts.use_qfuse(model) adds it to their products"
)

#: What PEFT's layer over a parameter adds an adapter by.
_ADDS = (aten.baddbmm.default, aten.add.Tensor)
_SWAPS = ([0, 2, 1], [0, -1, -2])


@dataclass(frozen=True)
class Stack:
    """The weights of all experts in a graph, as `scatter2scatter` takes them."""

    operands: tuple[fx.Node, ...]
    format: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Grouped:
    """Sorted rows `x` [S, K] times a stack; the rows of expert e end at offs[e].

    `node` is the call; `result` is the same node, or the one of its results that is the product.
    """

    node: fx.Node
    result: fx.Node
    x: fx.Node
    stack: Stack
    transposed: bool
    offs: fx.Node


@dataclass(frozen=True)
class Batched:
    """Row s of `x` times the expert ids[s]; `dim` is a dimension of size 1 of `x` and `result`."""

    node: fx.Node
    result: fx.Node
    x: fx.Node
    stack: Stack
    transposed: bool
    ids: fx.Node
    dim: int


def match_grouped(node: fx.Node) -> Grouped | str | None:
    """Match a grouped product with packed experts; give a reason where they are dense or train."""
    match call(node):
        case aten._grouped_mm.default, x, mat, offs, *rest if offs is not None:
            return _grouped(node, x, mat, offs) if all(a is None for a in rest) else None
        case op, x, mat, offs if op is _transformers("grouped_mm_fallback"):
            return _grouped(node, x, mat, offs)
        case op, _, mat, offs, grad if op is _transformers("grouped_mm_fallback_backward"):
            found = _grouped(node, grad, mat, offs, swapped=True)
            parts = {user.args[1] for user in node.users if user.users}
            trains = isinstance(found, Grouped) and parts != {0}
            return "the experts' weights train" if trains else found
    return None


def _grouped(
    node: fx.Node, x: Any, mat: Any, offs: Any, *, swapped: bool = False
) -> Grouped | str | None:
    if mat.meta["val"].dim() != 3 or x.meta["val"].dim() != 2:
        return None  # a product over groups along the sum, as for the weights' gradient
    source, odd = peel_swaps(mat)
    stack = match_stack(source)
    if stack is None or stack.format == DENSE:
        return ADAPTED_EXPERTS if source.target in _ADDS else DENSE_EXPERTS
    result = next((user for user in node.users if swapped and user.args[1] == 0), node)
    # `mat` is [E, in, out]; the stack is stored so unless it was seen swapped.
    return Grouped(node, result, x, stack, transposed=odd == swapped, offs=offs)


def match_batched(node: fx.Node) -> Batched | None:
    """Match a product of rows with gathered experts, packed or dense."""
    match call(node):
        case aten.bmm.default, fx.Node() as left, fx.Node() as right:
            return _batched(node, left, right, dim=2) or _batched(node, right, left, dim=1)
    return None


def _batched(node: fx.Node, gathered: fx.Node, x: fx.Node, *, dim: int) -> Batched | None:
    source, odd = peel_swaps(gathered)
    match call(source):
        case aten.index.Tensor, experts, [fx.Node() as ids] if x.meta["val"].shape[dim] == 1:
            stack = match_stack(experts)
            if stack is not None and ids.meta["val"].dim() == 1:
                return Batched(node, node, x, stack, transposed=odd != (dim == 1), ids=ids, dim=dim)
    return None


def match_stack(node: Any) -> Stack | None:
    """Match a stack of experts: dequantized, or a dense tensor of three dimensions."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 3:
        return None
    if node.target is torch.ops.qfuse.dequantize.default:
        operands, name, shape, _ = node.args
        return Stack(tuple(operands), name, tuple(shape))
    return Stack((node,), DENSE, tuple(value.shape))


def peel_swaps(node: Any) -> tuple[fx.Node, bool]:
    """Return the tensor below swaps of the last two dimensions, and whether their number is odd."""
    odd = False
    while (node.target is aten.permute.default and [*node.args[1]] in _SWAPS) or (
        node.target is aten.transpose.int and {a % 3 for a in node.args[1:]} == {1, 2}
    ):
        odd = not odd
        node = node.args[0]
    return node, odd


def _transformers(name: str) -> Any:
    """Return an op of transformers, or None where it is not loaded or has none of that name."""
    packet = getattr(torch.ops.transformers, name, None)
    return None if packet is None else packet.default
