"""Find the expert layers of transformers in a joint or inference graph.

This is a layer as `grouped_mm` traces it: T tokens have k = top_k slots each, R = T * k in all. A
sort by expert gives `order`, the slot of each row, and `inverse` is the row of each slot
(`inductor_q.ops.routing` defines the words and has a picture).

    forward                                   backward
    tokens [T, H]                             gradients of tokens [T, H]
      | index by order // k                     ^ index_put by order // k, which adds up
    rows [R, H]                               gradients of rows [R, H]
      | (1) @ gate_up                           ^ (4) @ gate_up'
    rows [R, 2I]                              gradients [R, 2I]
      | activation                              ^ backward of the activation
    x [R, I]                                  gradients [R, I]
      | (2) @ down                              ^ (3) @ down'
    y [R, H] --------------------.            weighted gradients [R, H]
      | * gates[order]           |              ^ * gates[order]
    weighted rows [R, H]   sum of d * y ------ d [R, H]
      | index by inverse    = gradient          ^ index_put by inverse
    rows by slot [T, k, H]  of the gates      gradients by slot [T, k, H]
      | sum over k                              ^ expand
    output [T, H]                             gradients of the output [T, H]

The products (1) and (3) *gather*: their rows are copies of tokens, which `scatter2scatter` can read
itself. The products (2) and (4) *sum*: their rows are added up per token, which it can do, too.
Masks of nobody's rows may stand right before or behind a product, and so may casts of rows that are
copied or added up: autocast of CUDA takes sums in float32. Each product is recognized by
what surrounds it, so that any may be missing or look otherwise: then its rows stay sorted, as the
model has them. The products of `batched_mm` take and give scattered rows, with nothing around them.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from inductor_q.capture.calls import call
from inductor_q.capture.experts_graph import Batched, Grouped, match_batched, match_grouped

aten = torch.ops.aten
prims = torch.ops.prims
_VIEWS = (aten.view.default, aten.reshape.default)


@dataclass(frozen=True)
class Slots:
    """`rows` [R, features], where row i is slot order[i] of `tokens` [T, features].

    Tokens may be of another dtype, to which or from which all of their copies are cast. Where the
    model weights the rows, `gates` [R] are the factors of the slots, and `column` [R, 1] =
    gates[order] are those of the rows.
    """

    tokens: fx.Node
    rows: fx.Node
    order: fx.Node
    top_k: int
    gates: fx.Node | None = None
    column: fx.Node | None = None


#: Slots, the reason why the graph does not show which they are, or None where it has no such rows.
_Found = Slots | str | None


@dataclass(frozen=True)
class Projection:
    """A product of a layer, and the slots whose tokens it gathers or sums, if it does.

    `reason` says why not, where rows are copied or added up in a way that cannot be used.
    """

    product: Grouped | Batched
    gathers: Slots | None = None
    sums: Slots | None = None
    reason: str = ""

    @property
    def order(self) -> fx.Node | None:
        slots = self.gathers or self.sums
        return slots.order if slots else None

    @property
    def top_k(self) -> int:
        slots = self.gathers or self.sums
        return slots.top_k if slots else 1


@dataclass(frozen=True)
class GatesGradient:
    """`sums` [R, 1] are those of d * y, for product (2), y = x @ w, and (3), d @ w', at `back`.

    They equal the sums of (d @ w') * x, for which y is neither kept nor computed again.
    """

    sums: fx.Node
    x: fx.Node
    back: fx.Node


@dataclass(frozen=True)
class Unsorted:
    """A call that adds the value of each row to a zero at slot order[i]: the gradient of gates.

    No two rows have one slot, but torch does not know that, and sorts them to add them up.
    """

    node: fx.Node
    order: fx.Node
    values: fx.Node


@dataclass(frozen=True)
class ExpertLayer:
    """The products of a graph that share one routing, in the order of the graph."""

    projections: tuple[Projection, ...]
    gates_gradients: tuple[GatesGradient, ...]
    unsorted: tuple[Unsorted, ...]


def find_layers(graph: fx.Graph) -> tuple[list[ExpertLayer], dict[fx.Node, str]]:
    """Find the expert layers of a graph, and say why other products with experts are in none."""
    layers: dict[tuple[fx.Node, str], list[Projection]] = defaultdict(list)
    refused: dict[fx.Node, str] = {}
    for node in graph.nodes:
        found = match_grouped(node) or match_batched(node)
        if isinstance(found, str):
            refused[node] = found
        elif isinstance(found, Grouped):
            # The size as text, since a symbol has no hash.
            layers[found.offs, str(_shape(found.x)[0])].append(_projection(found))
        elif found is not None:
            layers[found.ids, str(found.stack.shape[0])].append(Projection(found))
    return [_layer(projections) for projections in layers.values()], refused


def _projection(product: Grouped) -> Projection:
    found = _gathered(product)
    if isinstance(found, Slots):
        return Projection(product, gathers=found)
    found = found or _summed(product)
    if isinstance(found, Slots):
        return Projection(product, sums=found)
    return Projection(product, reason=found or "")


def _layer(projections: Sequence[Projection]) -> ExpertLayer:
    """Make a layer; rows stay sorted if more than their sums and the gates' gradient read them."""
    kept, gradients = [], []
    for projection in projections:
        y = projection.sums
        readers = [u for u in y.rows.users if _unweighted(u)[1] is not y.column] if y else []
        if y and readers:
            gradient = _gates_gradient(projection.product, y, readers, projections)
            if gradient:
                gradients.append(gradient)
            else:
                reason = "rows stay sorted: they are read again"
                projection = Projection(projection.product, reason=reason)
        kept.append(projection)
    orders = dict.fromkeys(p.order for p in kept if p.order)
    unsorted = [_unsorted(user, order) for order in orders for user in order.users]
    return ExpertLayer(tuple(kept), tuple(gradients), tuple(filter(None, unsorted)))


def _gates_gradient(
    product: Grouped | Batched, y: Slots, readers: list[fx.Node], others: Sequence[Projection]
) -> GatesGradient | None:
    """Find the gates' gradient, if nothing else but the sums reads the rows y of product (2)."""
    sums = _only_user(readers[0])
    for back in others:
        d, mirrored = back.gathers, back.product.transposed != product.transposed
        if d and d.column is y.column and mirrored and back.product.stack == product.stack:
            match call(sums), [call(reader) for reader in readers]:
                case (aten.sum.dim_IntList, _, [1], True, *_), [(aten.mul.Tensor, d.rows, y.rows)]:
                    if sums and _dtype(d.rows) == _dtype(y.rows):
                        return GatesGradient(sums, product.x, back.product.node)
    return None


def _unsorted(node: fx.Node, order: fx.Node) -> Unsorted | None:
    match call(node):
        case aten.index_put.default, zeros, [by], fx.Node() as values, *_ if by is order:
            if _is_zero(zeros) and _same(_shape(node), _shape(values)):
                return Unsorted(node, order, values)
    return None


# --- what stands before and behind a product ----------------------------------------------------


def _gathered(product: Grouped) -> _Found:
    """Find the tokens whose copies are the rows of a product, as before (1) and (3)."""
    rows, mask = _unmasked(_below_cast(product.x))
    rows, column = _unweighted(rows)
    found: _Found = None
    match call(_below_cast(rows)):
        case aten.index.Tensor, fx.Node() as tokens, [token_of_row]:
            found = _by_division(_narrow(tokens, product.x), rows, token_of_row)
        case aten.index_put.default, zeros, [row_of_slot], by_slot, True if _is_zero(zeros):
            found = _by_inverse(_repeated(by_slot, product.x), rows, row_of_slot)
    return _complete(found, column, mask, product)


def _summed(product: Grouped) -> _Found:
    """Find the sums per token of the rows of a product, as behind (2) and (4)."""
    rows, mask = _cast_of(product.result), None
    masked = _only_user(rows)
    if masked and _unmasked(masked)[0] is rows:
        rows, mask = masked, _unmasked(masked)[1]
    added = next((user for user in rows.users if _unweighted(user)[0] is rows), rows)
    terms = _cast_of(added)
    reader = _only_user(terms)
    found: _Found = None
    match call(reader):
        case aten.index_put.default, zeros, [token_of_row], by_row, True if by_row is terms:
            if reader and _is_zero(zeros):
                found = _by_division(_rounded(reader, product.result), rows, token_of_row)
        case aten.index.Tensor, by_row, [row_of_slot] if by_row is terms:
            found = _by_inverse(_total(reader, product.result), rows, row_of_slot)
    return _complete(found, _unweighted(added)[1], mask, product)


def _complete(
    found: _Found, column: fx.Node | None, mask: fx.Node | None, product: Grouped
) -> _Found:
    """Attach the gates, after proving that the mask hides no expert's rows."""
    if not isinstance(found, Slots):
        return found
    if mask and not _hides_nobodys(mask, found.order, product.offs):
        return "rows stay sorted: some are masked that may be an expert's"
    if column is None:
        return found
    if _dtype(column) != _dtype(product.x):
        return "rows stay sorted: their gates are of another dtype"
    match call(column.args[0]):
        case _, fx.Node() as gates, [found.order] if _same(_shape(gates), _shape(found.order)):
            return replace(found, gates=gates, column=column)
    return "rows stay sorted: their gates are not one a slot"


def _by_division(tokens: fx.Node, rows: fx.Node, token_of_row: object) -> _Found:
    """Return the slots, if the token of each row is order // top_k."""
    match call(token_of_row):
        case aten.div.Tensor_mode, fx.Node() as order, top_k, {"rounding_mode": "floor"}:
            return _slots(tokens, rows, order, top_k)
    return "rows stay sorted: their tokens are not slots divided by top_k"


def _by_inverse(
    source: tuple[fx.Node, object] | None, rows: fx.Node, row_of_slot: object
) -> _Found:
    """Return the slots, if the row of each is inverse[slot], where inverse[order] = 0, 1, 2, ..."""
    inverse = _peel(row_of_slot, aten.alias.default)
    match call(inverse):
        case aten.index_put.default, _, [fx.Node() as order], places if source:
            places = _peel(places, aten.alias.default)
            match call(places):
                case prims.iota.default, _, {"start": 0, "step": 1}:
                    if _same(_shape(inverse), _shape(order), _shape(places)):
                        tokens, top_k = source
                        return _slots(tokens, rows, order, top_k)
    return None


def _slots(tokens: fx.Node, rows: fx.Node, order: fx.Node, top_k: object) -> _Found:
    """Return the slots, if `order` is a permutation of them and each token has top_k."""
    if not isinstance(top_k, int):
        return "rows stay sorted: top_k is no number"
    sort = order.args[0] if order.target is operator.getitem and order.args[1] == 1 else None
    if len(call(sort)) != 2 or call(sort)[0] is not aten.sort.default:
        return "rows stay sorted: their order is not that of a sort"
    count, *features = _shape(tokens)
    if len(features) != 1:
        return None
    if not _same(_shape(order), (count * top_k,)):
        return f"rows stay sorted: they are not {top_k} a token"
    if not _same(_shape(rows), (count * top_k, *features)):
        return None
    return Slots(tokens, rows, order, top_k)


def _repeated(by_slot: object, x: fx.Node) -> tuple[fx.Node, object] | None:
    """Return `(tokens, top_k)` if `by_slot` is `tokens` repeated top_k times."""
    cast = _peel(by_slot, *_VIEWS, aten.clone.default)
    expanded = _peel(_below_cast(cast), *_VIEWS, aten.clone.default)
    match call(expanded):
        case aten.expand.default, source, _ if _is_flat(by_slot, _shape(expanded)):
            match call(source):
                case aten.unsqueeze.default, fx.Node() as tokens, 1:
                    return _narrow(tokens, x), _shape(expanded)[1]
    return None


def _total(by_slot: fx.Node | None, y: fx.Node) -> tuple[fx.Node, object] | None:
    """Return `(sums over the slots of each token, top_k)` if nothing else reads `by_slot`."""
    view = _only_user(by_slot)
    total = _only_user(view)
    match call(total):
        case aten.sum.dim_IntList, fx.Node(target=target), [1], *_ if target in _VIEWS and total:
            found = _rounded(total, y), _shape(view)[1]
            return found if _is_flat(by_slot, _shape(view)) and len(_shape(total)) == 2 else None
    return None


def _narrow(tokens: fx.Node, x: fx.Node) -> fx.Node:
    """Return what was cast to `tokens`, if the rows `x` of the product are cast back to it."""
    source = _below_cast(tokens)
    return source if _widens(source, tokens) and _dtype(source) == _dtype(x) else tokens


def _rounded(total: fx.Node, y: fx.Node) -> fx.Node:
    """Return the only reader of sums in a wider dtype than the product's, if it casts them back."""
    cast = _cast_of(total)
    return cast if _widens(cast, total) and _dtype(cast) == _dtype(y) else total


# --- single nodes -------------------------------------------------------------------------------


def _unmasked(rows: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Return the rows below a mask that writes zeros, and the mask; else the rows and None."""
    match call(rows):
        case aten.where.self, fx.Node() as mask, zero, fx.Node() as kept if _is_zero(zero):
            return kept, mask
    return rows, None


def _unweighted(rows: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Return the rows below a product with a column of gates, and the column; else rows, None."""
    match call(rows):
        case aten.mul.Tensor, fx.Node() as plain, fx.Node() as column:
            match call(column):
                case aten.unsqueeze.default, fx.Node(target=aten.index.Tensor), -1 | 1:
                    return (plain, column) if len(_shape(column)) == 2 else (rows, None)
    return rows, None


def _below_cast(node: Any) -> Any:
    """Return what a node casts from one floating-point dtype to another, or else the node."""
    match call(node):
        case prims.convert_element_type.default, fx.Node() as source, _:
            both = _dtype(source), _dtype(node)
            return source if all(dtype.is_floating_point for dtype in both) else node
    return node


def _cast_of(node: fx.Node) -> fx.Node:
    """Return the only reader of a node, if it is a cast, or else the node."""
    reader = _only_user(node)
    return reader if reader and _below_cast(reader) is node else node


def _widens(narrow: fx.Node, wide: fx.Node) -> bool:
    """Whether every value of one dtype is one of the other."""
    return torch.promote_types(_dtype(narrow), _dtype(wide)) == _dtype(wide)


def _hides_nobodys(mask: fx.Node, order: fx.Node, offs: fx.Node) -> bool:
    """Whether a mask hides only rows behind the last expert's, which are nobody's.

    `offs` counts the sorted ids from `low` to `high`, and the mask has those from `first` on.
    """
    match call(mask), call(offs):
        case (aten.unsqueeze.default, above, -1 | 1), (aten.cumsum.default, counts, *_):
            match call(above), call(counts):
                case (aten.ge.Scalar, ids, first), (aten.histc.default, counted, int(), *limits):
                    counted = _peel(counted, prims.convert_element_type.default)
                    same = call(ids) == call(counted) == (operator.getitem, order.args[0], 0)
                    numbers = [n for n in (*limits, first) if isinstance(n, int | float)]
                    # histc reads limits of 0 and 0 as the least and the greatest value.
                    return same and len(numbers) == 3 and numbers[0] < numbers[1] < numbers[2]
    return False


def _is_zero(node: object) -> bool:
    """Whether a node is a constant zero, of any shape."""
    match call(node):
        case (aten.full.default, _, 0, *_) | (aten.scalar_tensor.default, 0, *_):
            return True
    return False


def _peel(node: object, *targets: object) -> object:
    """Return the node below calls of `targets`, which pass on their first argument."""
    while isinstance(node, fx.Node) and node.target in targets:
        node = node.args[0]
    return node


def _only_user(node: fx.Node | None) -> fx.Node | None:
    return next(iter(node.users)) if node and len(node.users) == 1 else None


def _shape(node: object) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape) if isinstance(node, fx.Node) else ()


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _is_flat(rows: object, shape: tuple[int, ...]) -> bool:
    """Whether `rows` [a * b, c] may be a view of the shape [a, b, c]."""
    return len(shape) == 3 and _same(_shape(rows), (shape[0] * shape[1], shape[2]))


def _same(*shapes: tuple[int, ...]) -> bool:
    """Whether shapes are the same for every value of their symbols."""
    return all(statically_known_true(sym_eq(shapes[0], other)) for other in shapes[1:])
