"""Quantized projections that share an input become one product: `x @ [W_q; W_k; W_v]'`.

Each weight is dequantized straight into its rows of one buffer. Fewer launches and fuller waves for
a few rows; the split outputs are strided, which costs their consumers at many rows, so the preset's
`stack_projections.max_rows` bounds it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
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
    computed_from,
    emit,
    peel_transposes,
    positions,
    rows,
    tensor,
)
from inductor_q.passes.products import Product, as_product, packed_weight
from inductor_q.passes.runner import Site


class StackProjections:
    name: ClassVar[str] = "stack_projections"
    stage: ClassVar[str] = "joint"

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        most = context.threshold("stack_projections.max_rows", 0)
        groups: dict[tuple[fx.Node, torch.dtype], list[Product]] = defaultdict(list)
        for node in graph.find_nodes(op="call_function", target=MM):
            product = as_product(node)
            if product is None or product.weight is None:
                continue
            if peel_transposes(product.rhs)[1]:
                groups[product.x, tensor(node).dtype].append(product)
        order = positions(graph)
        for members in groups.values():
            if len(members) < 2:
                continue
            count = rows(members[0].node)
            reason = ""
            inputs = [n for m in members for n in (m.lhs, m.rhs)]
            if computed_from(inputs, [m.node for m in members], order):
                reason = CHAINED  # a weight chosen by another's result
            elif count > most:
                reason = (
                    f"{count} rows, more than stack_projections.max_rows={most} of the preset: "
                    "separate products are not slower and their outputs stay contiguous"
                )
            anchor = members[0]
            weight = packed_weight(anchor.weight)
            yield Site(anchor.node, reason, weight, members, by_choice=True)

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        members: list[Product] = site.plan
        first = members[0]
        with graph.inserting_before(first.node):
            weights = [m.weight for m in members]
            stacked = emit(graph, CAT, (weights, 0), first.node)
            rhs = emit(graph, PERMUTE, (stacked, [1, 0]), first.node)
            product = emit(graph, MM, (first.lhs, rhs), first.node)
            start = 0
            for member in members:
                end = start + member.cols
                part = emit(graph, SLICE, (product, 1, start, end), member.node)
                member.node.replace_all_uses_with(part)
                start = end
