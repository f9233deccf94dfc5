"""transformers' experts as they appear in a joint or inference graph.

`grouped_mm` is a grouped product of sorted rows and a stack, seen transposed or not; in dtypes that
torch's product does not compile for, an op of transformers' own. The rows of the first product are
copies of tokens, gathered by `index`, and `index_put` adds up their gradients. `batched_mm` is a
product of each row with its own copy of an expert, gathered by `index`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from inductor_q.ops.scatter2scatter import DENSE

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


@dataclass(frozen=True)
class Slots:
    """Tokens [T, K], with T * top_k slots in the order of a product's rows.

    Row i is slot order[i], of the token order[i] // top_k; `order` is a permutation.
    """

    tokens: fx.Node
    order: fx.Node
    top_k: int


def match_gather(product: Grouped) -> Slots | str | None:
    """The tokens that the rows of a product are copies of; a reason where the graph does not show
    which token each row is; None where rows are no copies."""
    rows: Any = product.x
    mask = None
    if rows.target is aten.where.self and _is_zero(rows.args[1]):
        mask, _, rows = rows.args
    if rows.target is not aten.index.Tensor:
        return None
    tokens, indices = rows.args
    if tokens.meta["val"].dim() != 2 or len(indices) != 1:
        return None
    return _slots(tokens, indices[0], mask, product.offs)


def match_sum(rows: fx.Node, product: Grouped) -> Slots | str | None:
    """The sum of each token's rows of a product, where nothing else reads `rows`, its result; a
    reason where the graph does not show which token each row is; None where they are not added."""
    mask = None
    user = _only_user(rows)
    if user and user.target is aten.where.self and _is_zero(user.args[1]) and user.args[2] is rows:
        mask, rows = user.args[0], user
        user = _only_user(rows)
    if not user or user.target is not aten.index_put.default or user.args[2:] != (rows, True):
        return None
    zeros, indices, *_ = user.args
    if not _is_zero(zeros) or user.meta["val"].dim() != 2 or len(indices) != 1:
        return None
    return _slots(user, indices[0], mask, product.offs)


def _only_user(node: fx.Node) -> Any:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _slots(tokens: fx.Node, index: fx.Node, mask: Any, offs: fx.Node) -> Slots | str:
    """The slots that rows `tokens[index]` are, zeros where `mask`; a reason where they may be
    others."""
    if index.target is not aten.div.Tensor_mode or index.kwargs != {"rounding_mode": "floor"}:
        return "rows stay sorted: their tokens are not slots divided by top_k"
    order: Any
    order, top_k = index.args
    if not isinstance(top_k, int):
        return "rows stay sorted: top_k is no number"
    sort = order.args[0] if order.target is operator.getitem and order.args[1] == 1 else None
    if sort is None or sort.target is not aten.sort.default or len(sort.args) > 1 or sort.kwargs:
        return "rows stay sorted: their order is not that of a sort"
    (count,) = order.meta["val"].shape  # one index for each row
    if not statically_known_true(tokens.meta["val"].shape[0] * top_k == count):
        return f"rows stay sorted: they are not {top_k} a token"
    if mask is not None and not _is_past(mask, sort, offs):
        return "rows stay sorted: some are masked that may be an expert's"
    return Slots(tokens, order, top_k)


def _is_past(mask: fx.Node, sort: fx.Node, offs: fx.Node) -> bool:
    """Whether `mask` has only rows from the last of `offs` on, which are no expert's: `offs` ends
    with how many ids are in a range, and the mask is of the sorted ids above it."""
    if mask.target is not aten.unsqueeze.default or offs.target is not aten.cumsum.default:
        return False
    above: Any = mask.args[0]
    counts: Any = offs.args[0]
    if above.target is not aten.ge.Scalar or counts.target is not aten.histc.default:
        return False
    masked, first = above.args
    counted, *limits = counts.args
    if counted.target is torch.ops.prims.convert_element_type.default:
        counted = counted.args[0]
    ids = (operator.getitem, (sort, 0))
    if not (masked.target, masked.args) == (counted.target, counted.args) == ids:
        return False
    # Without limits, or from 0 to 0, it would be from the least to the greatest.
    return len(limits) == 3 and limits[1] < limits[2] < first and mask.args[1] in (-1, 1)


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


def _is_zero(node: Any) -> bool:
    """A constant zero, of any shape."""
    if node.target is aten.full.default:
        return bool(node.args[1] == 0)
    return node.target is aten.scalar_tensor.default and bool(node.args[0] == 0)


def _transformers(name: str) -> Any:
    """An op of transformers, or None where it is not loaded or has none of that name."""
    packet = getattr(torch.ops.transformers, name, None)
    return None if packet is None else packet.default
