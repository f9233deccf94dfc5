"""Gradients of adapters that share an input become one product: `[dXA_q | dXA_k | dXA_v]' @ x`.

The mirror of `stack_adapters`: each dA = dXA' @ x reads all of x. Where the dXA lie side by side in
the buffer of `extend_k`, the stacked left operand is a slice of it. Refused where one gradient is
computed from another, as a user's own backward may.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import fx

from inductor_q.context import Context
from inductor_q.passes.graph import (
    CAT,
    CHAINED,
    MM,
    PERMUTE,
    SLICE,
    arg,
    as_matrix,
    backward_nodes,
    columns,
    computed_from,
    emit,
    peel_rows,
    peel_transposes,
    positions,
    tensor,
)
from inductor_q.passes.products import is_rank
from inductor_q.passes.runner import Site


@dataclass(frozen=True)
class _Gradient:
    """`left' @ x` with `left` [M, r]."""

    node: fx.Node
    left: fx.Node
    right: fx.Node
    rank: int


class StackGradients:
    name: ClassVar[str] = "stack_gradients"
    stage: ClassVar[str] = "joint"

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        backward = backward_nodes(graph)
        groups: dict[tuple[fx.Node, torch.dtype], list[_Gradient]] = defaultdict(list)
        for node in graph.find_nodes(op="call_function", target=MM):
            gradient = _as_gradient(node)
            if gradient is not None and node in backward and gradient.left in backward:
                groups[peel_rows(gradient.right), tensor(node).dtype].append(gradient)
        order = positions(graph)
        for members in groups.values():
            if len(members) > 1:
                inputs = [n for m in members for n in (m.left, m.right)]
                chained = computed_from(inputs, [m.node for m in members], order)
                yield Site(members[0].node, CHAINED if chained else "", plan=members)

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        members: list[_Gradient] = sorted(site.plan, key=_position)
        first = members[0]
        with graph.inserting_before(site.node):
            left = _side_by_side(graph, members)
            lhs = emit(graph, PERMUTE, (left, [1, 0]), first.node)
            product = emit(graph, MM, (lhs, first.right), first.node)
            start = 0
            for member in members:
                end = start + member.rank
                part = emit(graph, SLICE, (product, 0, start, end), member.node)
                member.node.replace_all_uses_with(part)
                start = end


def _as_gradient(node: fx.Node) -> _Gradient | None:
    left, transposed = peel_transposes(arg(node, 0))
    rank, cols = tensor(node).shape
    if not transposed or not isinstance(rank, int) or not isinstance(cols, int):
        return None
    return _Gradient(node, left, arg(node, 1), rank) if is_rank(rank, cols) else None


def _position(gradient: _Gradient) -> tuple[str, int]:
    """Slices of one buffer in the order of their columns, others in place."""
    span = columns(peel_rows(gradient.left))
    return (span[0].name, span[1]) if span else ("", 0)


def _side_by_side(graph: fx.Graph, members: Sequence[_Gradient]) -> fx.Node:
    spans = [columns(peel_rows(m.left)) for m in members]
    first, last = spans[0], spans[-1]
    adjacent = all(a and b and a[0] is b[0] and a[2] == b[1] for a, b in pairwise(spans))
    if adjacent and first and last:
        return emit(graph, SLICE, (first[0], 1, first[1], last[2]), members[0].node)
    return emit(graph, CAT, ([as_matrix(graph, m.left) for m in members], 1), members[0].node)
