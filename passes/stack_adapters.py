"""Adapters that share an input become one product: `x @ [A_q; A_k; A_v]'`.

A projection onto a rank is bound by reading x, so q, k and v together cost what one of them does.
Stacking pays for every shape. It needs adapters that share an input (dropout gives each layer its
own mask) and a dtype. The same projection twice becomes one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import fx

from inductor_q.passes.graph import CAST, CAT, MM, PERMUTE, arg, emit, peel_transposes, tensor
from inductor_q.passes.products import Product, as_product, is_projection
from inductor_q.passes.stack import Stack


class StackAdapters(Stack):
    name: ClassVar[str] = "stack_adapters"
    side: ClassVar[int] = 1

    def groups(self, graph: fx.Graph) -> Iterator[list[Product]]:
        """Group the projections of each input that a quantized layer reads, too.

        An input counts with the tensors one step of casting or dropout away from it, since PEFT
        applies those before the adapter.
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
        quantized |= {arg(x, 0) for x in quantized if x.target is CAST}
        quantized |= {user for x in quantized for user in x.users}
        yield from (members for (x, _), members in groups.items() if x in quantized)

    def arrange(self, members: Sequence[Product]) -> list[Product]:
        """Keep one product per adapter: the backward of `qfuse::lora_linear` projects x again."""
        kept: dict[fx.Node, Product] = {}
        for member in members:
            first = kept.setdefault(peel_transposes(member.rhs)[0], member)
            if first is not member:
                member.node.replace_all_uses_with(first.node)
        return list(kept.values())

    def operands(self, graph: fx.Graph, members: Sequence[Product]) -> tuple[fx.Node, fx.Node]:
        like = members[0].node
        stacked = emit(graph, CAT, ([_row_major(graph, m) for m in members], 0), like)
        return members[0].lhs, emit(graph, PERMUTE, (stacked, [1, 0]), like)


def _row_major(graph: fx.Graph, product: Product) -> fx.Node:
    """Return the right-hand side [K, r] as rows [r, K]."""
    below, transposed = peel_transposes(product.rhs)
    if transposed:
        return below
    return emit(graph, PERMUTE, (below, [1, 0]), product.node)
