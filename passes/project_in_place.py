"""Write a projection into the wide buffer that it is computed for.

In a checkpointed segment extend_k puts `x A'` beside x as a value of its own, so that
keep_checkpointed can keep it. Backward, which finds it kept, copies its few columns. In the graph
that computes it this pass makes the two one operation, and readers of the projection get a copy:
otherwise x would get a buffer of its own for the projection to read, and be copied into the wide
one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import fx

from inductor_q.context import Context
from inductor_q.passes.extend_k import EXTEND, EXTEND_DROPPED
from inductor_q.passes.fuse_dropout import PROJECT
from inductor_q.passes.graph import (
    CLONE,
    PAD,
    SLICE,
    arg,
    as_matrix,
    emit,
    last_size,
    peel_rows,
)
from inductor_q.passes.products import as_product
from inductor_q.passes.runner import PARTITIONED, Site


class ProjectInPlace:
    name: ClassVar[str] = "project_in_place"
    stage: ClassVar[str] = PARTITIONED

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        for wide in graph.find_nodes(op="call_function", target=EXTEND):
            blocks, lefts, *_ = wide.args
            if lefts or len(blocks) < 2:
                continue
            part = blocks[-1]
            node = peel_rows(arg(part, 0) if part.target is PAD else part)
            if node.target is PROJECT:
                if len(blocks) == 2 and peel_rows(blocks[0]) is peel_rows(arg(node, 0)):
                    yield Site(wide, plan=(node, blocks[0]))
            elif (product := as_product(node)) is not None and product.weight is None:
                source = next((x for x in blocks[:-1] if peel_rows(x) is product.x), None)
                if source is not None:
                    yield Site(wide, plan=(node, source))

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        wide, (node, source) = site.node, site.plan
        given: Any = wide.args[0]
        *blocks, part = given
        rank, start = last_size(node), sum(map(last_size, blocks))
        padding = last_size(part) - rank
        with graph.inserting_before(wide):
            if node.target is PROJECT:
                new = emit(graph, EXTEND_DROPPED, (source, *node.args[1:], padding), wide)
            else:
                new = emit(graph, EXTEND, (blocks, [source], [arg(node, 1)], padding), wide)
            span = (as_matrix(graph, new), 1, start, start + rank)
            copied = emit(graph, CLONE, (emit(graph, SLICE, span, node),), node)
        wide.replace_all_uses_with(new)
        graph.erase_node(wide)
        node.replace_all_uses_with(copied)
