"""Add an adapter's product where the product of the weight lies that it is added to.

`y = x W' + (x A') B'` in eight bits is two products. Written apart, both are as large as y, and
what reads the sum reads both. cuBLAS adds the second to the first in place, for as many bytes as
that costs. So nothing of the size of y is held beside it, and a backward pass keeps the sum, where
it would keep the first product and compute the second again.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from inductor_q.passes.graph import (
    ADD,
    VIEWS,
    arg,
    emit,
    is_tensor,
    peel_rows,
    replace,
    same_shape,
    tensor,
    widens,
)
from inductor_q.passes.products import as_product, is_rank

ADD_PRODUCT = torch.ops.qfuse.add_product.default


def add_adapter(graph: fx.Graph, product: fx.Node, others: Collection[fx.Node]) -> None:
    """Add to `product` [M, N] what is added to it, if that is an adapter's product `p B'`, none of
    `others`, and nothing else reads either. Both may be shown as other rows, or in float32, where
    the sum is rounded once to 16 bits before."""
    shown = product
    while (reader := _only_reader(shown)) is not None and _shows(reader):
        shown = reader
    if reader is None or reader.target is not ADD or reader.kwargs:
        return
    other = reader.args[1 if reader.args[0] is shown else 0]
    if not is_tensor(other) or other is shown or tensor(shown).dtype is not tensor(reader).dtype:
        return
    if not (same_shape(shown, other) and same_shape(shown, reader)):  # else one is broadcast
        return
    below = other
    while _shows(below):
        below = arg(below, 0)
    added = as_product(below)
    if added is None or added.node in others or not is_rank(added.inner, added.cols):
        return
    if not same_shape(added.node, product) or tensor(below).dtype is not tensor(product).dtype:
        return
    above = added.node
    while above is not other:
        next_above = _only_reader(above)
        if next_above is None:
            return
        above = next_above
    if _only_reader(above) is not reader:
        return
    with graph.inserting_before(reader):
        total = emit(graph, ADD_PRODUCT, (product, added.lhs, added.rhs), product)
    if shown is product:
        shown = total
    else:
        first = next(node for node in product.users if node is not total)
        first.replace_input_with(product, total)
    replace(reader, shown)
    graph.erase_node(reader)


def _only_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _shows(node: fx.Node) -> bool:
    """Whether a node is a view that keeps the last dimension, or a cast that keeps the values."""
    return widens(node) or (node.target in VIEWS and peel_rows(node) is not node)
