"""Add an adapter's product in place to the product of its layer's weight.

`y = x W' + (x A') B'` in eight bits is two products. Each is as large as y, and if both are
written, whatever reads the sum reads both. `qfuse::add_product` adds the second to the first in
place, which moves as many bytes. Then nothing of the size of y is held beside y, and what is kept
for backward is the sum: otherwise it is the first product, and backward computes the second again.

The adapter's factor, which `fold_lora` has put on B, is the op's: a product in float32 is scaled,
and rounded once, without a launch that scales B.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from inductor_q.passes.graph import (
    ADD,
    PERMUTE,
    VIEWS,
    arg,
    emit,
    is_tensor,
    is_view,
    replace,
    replay,
    same_shape,
    shows,
    single_user,
    tensor,
    written_inputs,
)
from inductor_q.passes.products import Product, as_product, as_scaled, is_rank

ADD_PRODUCT = torch.ops.qfuse.add_product.default


def add_adapter(graph: fx.Graph, product: fx.Node, others: Collection[fx.Node]) -> None:
    """Find what is added to `product` [M, N], and add it in place if it is an adapter's `p B'`.

    Nothing else may read either of the two, and the second may be none of `others`. Both may be
    viewed as other rows or cast to float32; the sum is then rounded to 16 bits before that.
    """
    shown = product
    while (reader := single_user(shown)) is not None and shows(reader):
        shown = reader
    if reader is None or reader.target is not ADD or reader.kwargs:
        return
    other = reader.args[1 if reader.args[0] is shown else 0]
    if not is_tensor(other) or other is shown or tensor(shown).dtype is not tensor(reader).dtype:
        return
    if not (same_shape(shown, other) and same_shape(shown, reader)):  # else one is broadcast
        return
    below = other
    while len(below.users) == 1 and shows(below):
        below = arg(below, 0)
    added = as_product(below) if len(below.users) == 1 else None
    if added is None or added.node in others or not is_rank(added.inner, added.cols):
        return
    if not same_shape(added.node, product) or tensor(below).dtype is not tensor(product).dtype:
        return
    with graph.inserting_before(reader):
        sides = without_factor(graph, added, product)
        total = emit(graph, ADD_PRODUCT, (product, *sides), product)
    if shown is product:
        shown = total
    else:
        first = next(node for node in product.users if node is not total)
        first.replace_input_with(product, total)
    replace(reader, shown)
    graph.erase_node(reader)


def without_factor(
    graph: fx.Graph, product: Product, like: fx.Node
) -> tuple[fx.Node, fx.Node, float]:
    """Emit the sides of a product without the number that either is multiplied by, and return that
    number as well. What else reads a scaled side still does. An input that the forward pass writes
    to stays scaled: backward would read other numbers."""
    lhs, of_lhs = _without_factor(graph, product.lhs, like)
    rhs, of_rhs = _without_factor(graph, product.rhs, like)
    return lhs, rhs, of_lhs * of_rhs


def _without_factor(graph: fx.Graph, node: fx.Node, like: fx.Node) -> tuple[fx.Node, float]:
    if node.target in VIEWS or node.target is PERMUTE:
        plain, factor = _without_factor(graph, arg(node, 0), like)
        return (node if factor == 1.0 else replay(graph, node, plain, like)), factor
    match as_scaled(node):
        case (plain, float(factor)) if _viewed(plain) not in written_inputs(graph):
            return plain, factor
    return node, 1.0


def _viewed(node: fx.Node) -> fx.Node:
    """Return the tensor in whose memory a view is."""
    while is_view(node):
        node = arg(node, 0)
    return node
