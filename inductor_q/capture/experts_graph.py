"""transformers' experts as they appear in a joint or inference graph.

`grouped_mm` is a grouped product of sorted rows and a stack, seen transposed or not; in dtypes that
torch's product does not compile for, an op of transformers' own. `batched_mm` is a product of each
row with its own copy of an expert, gathered by `index`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from inductor_q.kernels.calls import DENSE

aten = torch.ops.aten
_SWAPS = ([0, 2, 1], [0, -1, -2])


@dataclass(frozen=True)
class Stack:
    """The weights of all experts in a graph, as `scatter2scatter` takes them."""

    operands: tuple[fx.Node, ...]
    format: str
    shape: tuple[Any, ...]


@dataclass(frozen=True)
class Grouped:
    """Sorted rows `x` [S, K] times a stack; expert e's rows end at offs[e].

    `part` is the number of the node's result that this is, None where it has only one.
    """

    x: fx.Node
    stack: Stack
    transposed: bool
    offs: fx.Node
    part: int | None = None


@dataclass(frozen=True)
class Batched:
    """Row s of `x` times the expert ids[s]; `x` and the result have one more dimension, `dim`."""

    x: fx.Node
    stack: Stack
    transposed: bool
    ids: fx.Node
    dim: int


def match_grouped(node: fx.Node) -> Grouped | str | None:
    """A grouped product with packed experts; a reason where they are dense or train; None for
    anything else."""
    if node.target is aten._grouped_mm.default:
        x, mat, offs, *rest = [*node.args, None][:5]
        if offs is None or any(a is not None for a in (*rest, *node.kwargs.values())):
            return None
        return _grouped(x, mat, offs, swapped=False)
    if node.target is _transformers("grouped_mm_fallback"):
        return _grouped(*node.args, swapped=False)
    if node.target is _transformers("grouped_mm_fallback_backward"):
        _, mat, offs, grad = node.args
        found = _grouped(grad, mat, offs, swapped=True, part=0)
        parts = {user.args[1] for user in node.users if user.users}
        if isinstance(found, Grouped) and parts != {0}:
            return "the experts' weights train"
        return found
    return None


def _grouped(
    x: Any, mat: Any, offs: Any, *, swapped: bool, part: int | None = None
) -> Grouped | str | None:
    if mat.meta["val"].dim() != 3 or x.meta["val"].dim() != 2:
        return None  # a product over groups along the sum, as for the weights' gradient
    source, odd = peel_swaps(mat)
    stack = match_stack(source)
    if stack is None or stack.format == DENSE:
        return "the experts are dense: torch's grouped product reads them as they are"
    # `mat` is [E, in, out]; the stack is stored so unless it was seen swapped.
    return Grouped(x, stack, transposed=odd == swapped, offs=offs, part=part)


def match_batched(node: fx.Node) -> Batched | None:
    """A product of rows with gathered experts, packed or dense."""
    if node.target is not aten.bmm.default:
        return None
    left, right = node.args
    gathered: Any
    x: Any
    for gathered, x, dim, swap in ((left, right, 2, False), (right, left, 1, True)):
        source: Any
        source, odd = peel_swaps(gathered)
        if source.target is not aten.index.Tensor or x.meta["val"].shape[dim] != 1:
            continue
        experts, indices = source.args
        stack = match_stack(experts)
        if stack is not None and len(indices) == 1 and indices[0].meta["val"].dim() == 1:
            return Batched(x, stack, transposed=odd != swap, ids=indices[0], dim=dim)
    return None


def match_stack(node: Any) -> Stack | None:
    """A stack of experts: dequantized, or a dense tensor of three dimensions."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 3:
        return None
    if node.target is torch.ops.qfuse.dequantize.default:
        operands, name, shape, _ = node.args
        return Stack(tuple(operands), name, tuple(shape))
    return Stack((node,), DENSE, tuple(value.shape))


def peel_swaps(node: Any) -> tuple[fx.Node, bool]:
    """Through swaps of the last two dimensions: the tensor below, and whether they are odd."""
    odd = False
    while (node.target is aten.permute.default and [*node.args[1]] in _SWAPS) or (
        node.target is aten.transpose.int and {a % 3 for a in node.args[1:]} == {1, 2}
    ):
        odd = not odd
        node = node.args[0]
    return node, odd


def _transformers(name: str) -> Any:
    """An op of transformers, or None where it is not loaded or has none of that name."""
    packet = getattr(torch.ops.transformers, name, None)
    return None if packet is None else packet.default
