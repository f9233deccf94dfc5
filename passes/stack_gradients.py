"""Gradients of adapters that share an input become one product: `[dXA_q | dXA_k | dXA_v]' @ x`.

This mirrors `stack_adapters`: each dA = dXA' @ x reads all of x. Where the dXA lie side by side in
the buffer of `extend_k`, the stacked left operand is a slice of it. The pass refuses gradients of
which one is computed from another, as a user's own backward may do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import ClassVar

import torch
from torch import fx

from inductor_q.passes.graph import (
    CAT,
    MM,
    PERMUTE,
    SLICE,
    arg,
    as_matrix,
    backward_nodes,
    columns,
    emit,
    peel_rows,
    peel_transposes,
    tensor,
)
from inductor_q.passes.products import Product, is_rank
from inductor_q.passes.stack import Stack


class StackGradients(Stack):
    name: ClassVar[str] = "stack_gradients"
    side: ClassVar[int] = 0

    def groups(self, graph: fx.Graph) -> Iterator[list[Product]]:
        """Group the products `dXA' @ x` [r, K] of backward by x."""
        backward = backward_nodes(graph)
        groups: dict[tuple[fx.Node, torch.dtype], list[Product]] = defaultdict(list)
        for node in graph.find_nodes(op="call_function", target=MM):
            lhs, rhs = arg(node, 0), arg(node, 1)
            left, transposed = peel_transposes(lhs)
            rank, cols = tensor(node).shape
            static = isinstance(rank, int) and isinstance(cols, int)
            if transposed and static and is_rank(rank, cols) and {node, left} <= backward:
                product = Product(node, lhs, rhs, x=peel_rows(lhs))
                groups[peel_rows(rhs), tensor(node).dtype].append(product)
        yield from groups.values()

    def arrange(self, members: Sequence[Product]) -> list[Product]:
        """Sort slices of one buffer by their columns; others keep their order."""
        return sorted(members, key=_position)

    def operands(self, graph: fx.Graph, members: Sequence[Product]) -> tuple[fx.Node, fx.Node]:
        like = members[0].node
        left = _side_by_side(graph, [_left(m) for m in members], like)
        return emit(graph, PERMUTE, (left, [1, 0]), like), members[0].rhs


def _left(product: Product) -> fx.Node:
    """The gradient dXA [M, r]."""
    return peel_transposes(product.lhs)[0]


def _position(product: Product) -> tuple[str, int]:
    span = columns(peel_rows(_left(product)))
    return (span[0].name, span[1]) if span else ("", 0)


def _side_by_side(graph: fx.Graph, lefts: Sequence[fx.Node], like: fx.Node) -> fx.Node:
    spans = [columns(peel_rows(left)) for left in lefts]
    first, last = spans[0], spans[-1]
    adjacent = all(a and b and a[0] is b[0] and a[2] == b[1] for a, b in pairwise(spans))
    if adjacent and first and last:
        return emit(graph, SLICE, (first[0], 1, first[1], last[2]), like)
    return emit(graph, CAT, ([as_matrix(graph, left) for left in lefts], 1), like)
