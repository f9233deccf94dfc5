"""Add an adapter's product in place to the product of its layer's weight.

`y = x W' + (x A') B'` in eight bits is two products. Each is as large as y, and if both are
written, whatever reads the sum reads both. `qfuse::add_product` adds the second to the first in
place, which moves as many bytes. Then nothing of the size of y is held beside y, and what is kept
for backward is the sum: otherwise it is the first product, and backward computes the second again.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from inductor_q.passes.graph import (
    ADD,
    arg,
    emit,
    is_tensor,
    replace,
    same_shape,
    shows,
    single_user,
    tensor,
)
from inductor_q.passes.products import as_product, is_rank

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
        total = emit(graph, ADD_PRODUCT, (product, added.lhs, added.rhs), product)
    if shown is product:
        shown = total
    else:
        first = next(node for node in product.users if node is not total)
        first.replace_input_with(product, total)
    replace(reader, shown)
    graph.erase_node(reader)
