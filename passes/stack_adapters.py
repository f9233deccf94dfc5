"""Adapters that share an input become one product: `x @ [A_q; A_k; A_v]'`.

A projection onto a rank is bound by reading x, so q, k and v together cost what one of them does.
Pays for every shape; refused where the adapters do not share an input (dropout gives each layer its
own mask) or a dtype. The same projection twice becomes one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
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
    tensor,
)
from inductor_q.passes.products import Product, as_product, is_projection
from inductor_q.passes.runner import Site


class StackAdapters:
    name: ClassVar[str] = "stack_adapters"
    stage: ClassVar[str] = "joint"

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        quantized, groups = _scan(graph)
        order = positions(graph)
        for key, members in groups.items():
            x = key[0]
            if x not in quantized:
                continue  # not the adapters of a quantized layer: none of our business
            if len(members) > 1:
                inputs = [n for m in members for n in (m.lhs, m.rhs)]
                chained = computed_from(inputs, [m.node for m in members], order)
                yield Site(members[0].node, CHAINED if chained else "", plan=members)

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        members = _distinct(site.plan)
        if len(members) < 2:
            return
        first = members[0]
        with graph.inserting_before(first.node):
            rows = [_row_major(graph, m) for m in members]
            stacked = emit(graph, CAT, (rows, 0), first.node)
            rhs = emit(graph, PERMUTE, (stacked, [1, 0]), first.node)
            product = emit(graph, MM, (first.lhs, rhs), first.node)
            start = 0
            for member in members:
                end = start + member.cols
                part = emit(graph, SLICE, (product, 1, start, end), member.node)
                member.node.replace_all_uses_with(part)
                start = end


def _scan(
    graph: fx.Graph,
) -> tuple[set[fx.Node], dict[tuple[fx.Node, torch.dtype], list[Product]]]:
    """Inputs of quantized products, and the projections of each input by dtype.

    An input counts with the tensors one step of casting or dropout away from it, since PEFT applies
    those before the adapter.
    """
    quantized: set[fx.Node] = set()
    groups: dict[tuple[fx.Node, torch.dtype], list[Product]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=MM):
        product = as_product(node)
        if product is None:
            continue
        if product.weight is not None:
            quantized.add(product.x)
        elif is_projection(product):
            groups[product.x, tensor(node).dtype].append(product)
    derived = {user for x in quantized for user in x.users}
    return quantized | derived, groups


def _distinct(members: Sequence[Product]) -> list[Product]:
    """One product for each adapter: the backward of `qfuse::lora_linear` projects x again."""
    kept: dict[fx.Node, Product] = {}
    for member in members:
        first = kept.setdefault(peel_transposes(member.rhs)[0], member)
        if first is not member:
            member.node.replace_all_uses_with(first.node)
    return list(kept.values())


def _row_major(graph: fx.Graph, product: Product) -> fx.Node:
    """The right-hand side [K, r] as rows [r, K]."""
    below, transposed = peel_transposes(product.rhs)
    if transposed:
        return below
    return emit(graph, PERMUTE, (below, [1, 0]), product.node)
