"""The products of a sum of matrices add up in one buffer: one writes it, the others add to it.

`x @ W' + (x @ A') @ B'` becomes `addmm` in Inductor where x is a matrix, and that copies its first
input before it adds: a pass over [M, N] for each term. Sums of more dimensions are left to
Inductor, which adds them in the kernel that reads them. Comes after extend_k, whose sums are one
product. Each product is rounded once less; numerics "strict" keeps them as written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from inductor_q.diagnostics.context import Context
from inductor_q.passes.fold_lora import STRICT
from inductor_q.passes.graph import ADD, emit, is_tensor, tensor
from inductor_q.passes.products import Product, as_product, packed_weight, terms
from inductor_q.passes.runner import Site

ACCUMULATE = torch.ops.qfuse.accumulate.default


@dataclass(frozen=True)
class _Sum:
    """`node` = base product + other products + rest."""

    node: fx.Node
    base: Product
    others: tuple[Product, ...]
    rest: tuple[fx.Node, ...]


class Accumulate:
    name: ClassVar[str] = "accumulate"
    stage: ClassVar[str] = "joint"

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        rejected = STRICT if context.numerics == "strict" else ""
        for found in _sums(graph):
            weight = packed_weight(found.base.weight)
            yield Site(found.node, rejected, weight, found, by_choice=True)

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        found: _Sum = site.plan
        with graph.inserting_before(found.node):
            result = found.base.node
            for product in found.others:
                result = emit(graph, ACCUMULATE, (result, product.lhs, product.rhs), product.node)
            for term in found.rest:
                result = emit(graph, ADD, (result, term), found.node)
        found.node.replace_all_uses_with(result)


def _sums(graph: fx.Graph) -> Iterator[_Sum]:
    """Every maximal sum of matrices with a quantized product and another among its terms."""
    inside: set[fx.Node] = set()
    for node in reversed(graph.find_nodes(op="call_function", target=ADD)):
        if node in inside or not is_tensor(node) or node.kwargs:  # alpha
            continue
        products: list[Product] = []
        rest: list[fx.Node] = []
        for term in terms(node, inside):
            product = _product(term, of=node)
            if product is None:
                rest.append(term)
            else:
                products.append(product)
        base = next((product for product in products if product.weight is not None), None)
        if base is not None and len(products) > 1:
            others = tuple(product for product in products if product is not base)
            yield _Sum(node, base, others, tuple(rest))


def _product(term: fx.Node, of: fx.Node) -> Product | None:
    """A term that nothing else reads, neither broadcast nor cast by the sum."""
    product = as_product(term)
    if product is None or len(term.users) != 1:
        return None
    found, wanted = tensor(term), tensor(of)
    return product if (found.shape, found.dtype) == (wanted.shape, wanted.dtype) else None
