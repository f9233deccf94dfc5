"""Make products whose results are summed one product: `[dY1, dY2] @ [W1; W2]`.

Layers of one input give it a gradient each, `dY W`, and backward adds them. A product that cannot
add to what is there writes each of them, as large as the input, and the sum reads them all; one
product over all out-features writes the sum alone. The adapters' shares `(dY B) A` of the sum
become one product likewise. It costs that the codes of all its weights exist at a time, and that
the first dY waits for the last: so a product takes at most MOST of a sum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import fx

from inductor_q.passes.add_adapters import without_factor
from inductor_q.passes.graph import (
    ADD,
    CAT,
    MM,
    MUL,
    arg,
    emit,
    is_tensor,
    is_view,
    peel_rows,
    replace,
    same_shape,
    shows,
    single_user,
    tensor,
)
from inductor_q.passes.products import Product, as_product, is_rank

MOST = 4  # as many as read one input in a layer, of attention, a gated MLP or a delta net


def sum_of(product: fx.Node) -> fx.Node | None:
    """Return the sum, of however many summands, that is all that reads a product."""
    found, below = None, product
    while (reader := single_user(below)) is not None:
        if is_sum(reader):
            found = reader
        elif not shows(reader):
            break
        below = reader
    return found


def adapters_of(products: Sequence[Product], others: Collection[fx.Node]) -> list[Product]:
    """Find the summands of the sum of `products` that are their adapters': `(dY B) A` of the same
    dY, of one shape and dtype, and none of `others`; in the order of the graph, in which
    `stack_gradients` joins what they read, too."""
    like, inputs = products[0].node, {product.x for product in products}
    total, found = sum_of(like), []
    for node in sorted(_summands(total)) if total is not None else ():
        product = as_product(node)
        if product is None or node in others or not is_rank(product.inner, product.cols):
            continue
        same = same_shape(node, like) and tensor(node).dtype is tensor(like).dtype
        if same and _projected(product.lhs) in inputs:
            found.append(product)
    return found


def stack_inner(
    graph: fx.Graph, products: Sequence[Product], like: fx.Node
) -> tuple[fx.Node, fx.Node, float]:
    """Emit the two sides of the one product that is the sum of `products`, and return the factor
    that all of them have, where they have one."""
    sides = [without_factor(graph, product, like) for product in products]
    if len({factor for *_, factor in sides}) > 1:
        sides = [(product.lhs, product.rhs, 1.0) for product in products]
    if len(sides) == 1:
        return sides[0]
    lefts, rights, factors = zip(*sides, strict=True)
    lhs = emit(graph, CAT, (list(lefts), 1), like)
    return lhs, emit(graph, CAT, (list(rights), 0), like), factors[0]


def drop_summand(graph: fx.Graph, node: fx.Node) -> None:
    """Take a product out of the sum that alone reads it, and out of the graph."""
    below = [node]
    while (reader := single_user(below[-1])) is not None and not is_sum(reader):
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
            if is_sum(below):
                todo.append(below)
            else:
                yield below


def _projected(node: fx.Node) -> fx.Node | None:
    """Return x of a projection `x B`, which may be scaled."""
    while is_view(node) or node.target is MUL:
        node = arg(node, 0)
    return peel_rows(arg(node, 0)) if node.target is MM else None


def is_sum(node: fx.Node) -> bool:
    """Whether a node adds two tensors of its own shape and dtype."""
    if node.target is not ADD or node.kwargs or node.args[0] is node.args[1]:
        return False
    return all(
        is_tensor(a) and same_shape(a, node) and tensor(a).dtype is tensor(node).dtype
        for a in node.args
    )
