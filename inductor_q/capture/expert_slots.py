"""Which token each sorted row of a grouped product belongs to, as transformers writes it.

Before a product, rows are copies of tokens, gathered by `index`; in backward, gradients of tokens,
repeated and put at their rows by `index_put`. After it, rows are put back in the order of slots by
`index` and a token's are added; in backward, `index_put` adds them. Either way they may be
weighted by gates, and masked next to the product.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from inductor_q.capture.experts_graph import Grouped, match_grouped

aten = torch.ops.aten
prims = torch.ops.prims
_VIEWS = (aten.view.default, aten.reshape.default)


@dataclass(frozen=True)
class Slots:
    """Tokens [T, K], with T * top_k slots in the order of a product's rows.

    Row i is slot order[i], of the token order[i] // top_k; `order` is a permutation. `gates`
    [T * top_k], if any, are factors of the slots, and `column` [T * top_k, 1] those of the rows.
    """

    tokens: fx.Node
    order: fx.Node
    top_k: int
    gates: fx.Node | None = None
    column: fx.Node | None = None


@dataclass(frozen=True)
class GatesGradient:
    """`sums` [T * top_k, 1] of a product's rows times their unweighted gradients. `back` is the
    product of the weighted gradients with the same weights."""

    sums: fx.Node
    back: fx.Node


def match_gathered(product: Grouped) -> Slots | str | None:
    """The tokens that a product's rows are copies of; a reason where the graph does not show which
    token each is; None where they are no copies."""
    rows, mask = _unmasked(product.x)
    rows, column = _unweighted(rows)
    found: Slots | str | None = None
    if rows.target is aten.index.Tensor:
        found = _divided(rows, *rows.args)
    elif rows.target is aten.index_put.default and rows.args[3:] == (True,):
        zeros, indices, values, _ = rows.args
        tokens, top_k = _repeated(values)
        if tokens is not None and _is_zero(zeros):
            found = _inverted(rows, tokens, indices, top_k)
    return _complete(found, column, mask, product)


def match_summed(
    value: fx.Node, product: Grouped
) -> tuple[Slots | str | None, GatesGradient | None]:
    """The sum of each token's rows of a product, whose result is `value`, and what else reads them;
    a reason where the graph does not show which token each is, or where more reads them; None where
    they are not summed."""
    rows, mask, column = value, None, None
    user = _only_user(value)
    if user and _unmasked(user)[0] is value:
        rows, mask = user, user.args[0]
    readers = [*rows.users]
    added = next((u for u in readers if _unweighted(u)[0] is rows), rows)
    if added is not rows:
        column = added.args[1]
        readers.remove(added)
    user = _only_user(added)
    found: Slots | str | None = None
    if user and user.target is aten.index_put.default and user.args[2:] == (added, True):
        found = _divided(added, user, user.args[1]) if _is_zero(user.args[0]) else None
    elif user and user.target is aten.index.Tensor and user.args[0] is added:
        total, top_k = _total(user)
        found = _inverted(added, total, user.args[1], top_k) if total else None
    slots = _complete(found, column, mask, product)
    if column is None or not readers or not isinstance(slots, Slots):
        return slots, None
    gradient = _gates_gradient(rows, readers, column, product)
    return (slots, gradient) if gradient else ("rows stay sorted: they are read again", None)


def _gates_gradient(
    rows: fx.Node, readers: list[fx.Node], column: Any, product: Grouped
) -> GatesGradient | None:
    """What reads the rows of a product, if that is it."""
    (dots, *more), sums = readers, _only_user(readers[0])
    if more or dots.target is not aten.mul.Tensor or dots.args[1] is not rows or not sums:
        return None
    if sums.target is not aten.sum.dim_IntList or sums.args != (dots, [1], True) or sums.kwargs:
        return None
    gradients: Any = dots.args[0]
    if not rows.meta["val"].dtype == gradients.meta["val"].dtype == sums.meta["val"].dtype:
        return None
    for weighted in gradients.users:
        back = _only_user(weighted)
        if back and _unmasked(back)[0] is weighted:
            back = _only_user(back)
        found = match_grouped(back) if back else None
        if not isinstance(found, Grouped) or _unmasked(found.x)[0] is not weighted:
            continue
        same = (found.stack, found.offs) == (product.stack, product.offs)
        gathered = match_gathered(found)
        if same and found.transposed != product.transposed and isinstance(gathered, Slots):
            return GatesGradient(sums, back) if gathered.column is column else None
    return None


def _complete(
    found: Slots | str | None, column: Any, mask: Any, product: Grouped
) -> Slots | str | None:
    """With gates; and masked rows are what they are without the mask."""
    if not isinstance(found, Slots):
        return found
    if mask is not None and not _is_past(mask, found.order.args[0], product.offs):
        return "rows stay sorted: some are masked that may be an expert's"
    if column is None:
        return found
    if column.meta["val"].dtype != product.x.meta["val"].dtype:
        return "rows stay sorted: their gates are of another dtype"
    gates, indices = column.args[0].args
    if indices != [found.order] or not _same(
        gates.meta["val"].shape, found.order.meta["val"].shape
    ):
        return "rows stay sorted: their gates are not one a slot"
    return replace(found, gates=gates, column=column)


def _divided(rows: fx.Node, tokens: Any, indices: Any) -> Slots | str | None:
    """Row i is of the token indices[i]."""
    if len(indices) != 1:
        return None
    (index,) = indices
    if index.target is not aten.div.Tensor_mode or index.kwargs != {"rounding_mode": "floor"}:
        return "rows stay sorted: their tokens are not slots divided by top_k"
    return _slots(rows, tokens, *index.args)


def _inverted(rows: fx.Node, tokens: fx.Node, indices: Any, top_k: Any) -> Slots | str | None:
    """Slot s is the row indices[s]: at each slot of an order, its place there."""
    inverse = _unaliased(indices[0])
    if len(indices) != 1 or inverse.target is not aten.index_put.default:
        return None
    _, orders, places, *accumulate = inverse.args
    places = _unaliased(places)
    if len(orders) != 1 or accumulate or places.target is not prims.iota.default:
        return None
    (order,) = orders
    if (places.kwargs["start"], places.kwargs["step"]) != (0, 1):
        return None
    shape = order.meta["val"].shape
    if not all(_same(node.meta["val"].shape, shape) for node in (inverse, places)):
        return None
    return _slots(rows, tokens, order, top_k)


def _slots(rows: fx.Node, tokens: fx.Node, order: Any, top_k: Any) -> Slots | str | None:
    if not isinstance(top_k, int):
        return "rows stay sorted: top_k is no number"
    sort = order.args[0] if order.target is operator.getitem and order.args[1] == 1 else None
    if sort is None or sort.target is not aten.sort.default or len(sort.args) > 1 or sort.kwargs:
        return "rows stay sorted: their order is not that of a sort"
    if tokens.meta["val"].dim() != 2:
        return None
    count, features = tokens.meta["val"].shape
    if not _same(order.meta["val"].shape, (count * top_k,)):
        return f"rows stay sorted: they are not {top_k} a token"
    if not _same(rows.meta["val"].shape, (count * top_k, features)):
        return None
    return Slots(tokens, order, top_k)


def _repeated(values: Any) -> tuple[Any, Any]:
    """Tokens, each as often as it has slots, and how often that is; or None."""
    expanded = values.args[0] if values.target in _VIEWS else values
    if expanded.target is aten.clone.default:
        expanded = expanded.args[0]
    if expanded.target is not aten.expand.default:
        return None, None
    source, shape = expanded.args[0], expanded.meta["val"].shape
    if source.target is not aten.unsqueeze.default or source.args[1] != 1 or len(shape) != 3:
        return None, None
    if not _same(values.meta["val"].shape, (shape[0] * shape[1], shape[2])):
        return None, None
    return source.args[0], shape[1]


def _total(by_slot: fx.Node) -> tuple[Any, Any]:
    """The sum of rows in the order of slots over those of each token, and how many it has; or
    None."""
    view = _only_user(by_slot)
    total = _only_user(view) if view else None
    if not total or view.target not in _VIEWS or view.meta["val"].dim() != 3:
        return None, None
    if total.target is not aten.sum.dim_IntList or total.args[1:] != ([1],) or total.kwargs:
        return None, None
    shape = view.meta["val"].shape
    if not _same(by_slot.meta["val"].shape, (shape[0] * shape[1], shape[2])):
        return None, None
    return total, shape[1]


def _unmasked(rows: Any) -> tuple[Any, Any]:
    """Rows that are zero where a mask is, and the mask; or as they are."""
    if rows.target is aten.where.self and _is_zero(rows.args[1]):
        return rows.args[2], rows.args[0]
    return rows, None


def _unweighted(rows: Any) -> tuple[Any, Any]:
    """Rows times a column of gates, gathered by an index, and the column; or as they are."""
    if rows.target is not aten.mul.Tensor or not all(isinstance(a, fx.Node) for a in rows.args):
        return rows, None
    inner, column = rows.args
    if column.target is not aten.unsqueeze.default or column.args[1] not in (-1, 1):
        return rows, None
    one_each = column.args[0].target is aten.index.Tensor and column.meta["val"].dim() == 2
    return (inner, column) if one_each else (rows, None)


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two shapes are the same for every value of their symbols."""
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(statically_known_true(a == b) for a, b in pairs)


def _unaliased(node: Any) -> Any:
    """What a node is, where a checkpoint was traced around it."""
    while node.target is aten.alias.default:
        node = node.args[0]
    return node


def _only_user(node: fx.Node) -> Any:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_zero(node: Any) -> bool:
    """A constant zero, of any shape."""
    if node.target is aten.full.default:
        return bool(node.args[1] == 0)
    return node.target is aten.scalar_tensor.default and bool(node.args[0] == 0)


def _is_past(mask: fx.Node, sort: Any, offs: fx.Node) -> bool:
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
    if counted.target is prims.convert_element_type.default:
        counted = counted.args[0]
    ids = (operator.getitem, (sort, 0))
    if not (masked.target, masked.args) == (counted.target, counted.args) == ids:
        return False
    if len(limits) != 3 or not all(isinstance(n, int | float) for n in (*limits, first)):
        return False
    # From 0 to 0 would be from the least to the greatest.
    return limits[1] < limits[2] < first and mask.args[1] in (-1, 1)
