"""Make products whose results are summed one product: `[dY1, dY2] @ [W1; W2]`.

Layers of one input give it a gradient each, `dY W`, and backward adds them. A product that cannot
add to what is there writes each of them, as large as the input, and the sum reads them all; one
product over all out-features writes the sum alone. The adapters' shares `(dY B) A` of the sum
become one product likewise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import fx

from inductor_q.passes.graph import (
    ADD,
    CAT,
    arg,
    emit,
    is_tensor,
    replace,
    same_shape,
    shows,
    single_user,
    tensor,
)
from inductor_q.passes.products import Product, as_product, is_rank


def sum_of(product: fx.Node) -> fx.Node | None:
    """Return the sum, of however many summands, that is all that reads a product."""
    found, below = None, product
    while (reader := single_user(below)) is not None:
        if _is_sum(reader):
            found = reader
        elif not shows(reader):
            break
        below = reader
    return found


def adapters_in(total: fx.Node, like: fx.Node, others: Collection[fx.Node]) -> list[Product]:
    """Find the summands of a sum that are adapters' products, of the shape and dtype of `like` and
    none of `others`, in the order of the graph: so does `stack_gradients` join what they read."""
    found = []
    for node in sorted(_summands(total)):
        product = as_product(node)
        if product is None or node in others or not is_rank(product.inner, product.cols):
            continue
        if same_shape(node, like) and tensor(node).dtype is tensor(like).dtype:
            found.append(product)
    return found


def stack_inner(
    graph: fx.Graph, products: Sequence[Product], like: fx.Node
) -> tuple[fx.Node, fx.Node]:
    """Emit the two sides of the one product that is the sum of `products`."""
    if len(products) == 1:
        return products[0].lhs, products[0].rhs
    lhs = emit(graph, CAT, ([product.lhs for product in products], 1), like)
    return lhs, emit(graph, CAT, ([product.rhs for product in products], 0), like)


def drop_summand(graph: fx.Graph, node: fx.Node) -> None:
    """Take a product out of the sum that alone reads it, and out of the graph."""
    below = [node]
    while (reader := single_user(below[-1])) is not None and not _is_sum(reader):
        below.append(reader)
    assert reader is not None, f"{node=} is no summand"
    replace(reader, arg(reader, 1 if reader.args[0] is below[-1] else 0))
    for dead in (reader, *reversed(below)):
        graph.erase_node(dead)


def _summands(total: fx.Node) -> Iterator[fx.Node]:
    """Find what a sum adds, below casts and views, as far as nothing else reads it."""
    todo = [total]
    while todo:
        for below in todo.pop().all_input_nodes:
            while single_user(below) is not None and shows(below):
                below = arg(below, 0)
            if single_user(below) is None:
                continue
            if _is_sum(below):
                todo.append(below)
            else:
                yield below


def _is_sum(node: fx.Node) -> bool:
    """Whether a node adds two tensors of its own shape and dtype."""
    if node.target is not ADD or node.kwargs or node.args[0] is node.args[1]:
        return False
    return all(
        is_tensor(a) and same_shape(a, node) and tensor(a).dtype is tensor(node).dtype
        for a in node.args
    )
