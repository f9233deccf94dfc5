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

from inductor_q.capture import bnb_graph
from inductor_q.context import Context
from inductor_q.passes.fold_lora import STRICT
from inductor_q.passes.graph import ADD, emit, is_tensor, same_shape, tensor
from inductor_q.passes.products import Product, as_product, packed_weight, sums
from inductor_q.passes.runner import Site

ACCUMULATE = torch.ops.qfuse.accumulate.default


@dataclass(frozen=True)
class _Sum:
    """`node` = `base`, a product with the packed `weight`, + `others` + `rest`."""

    node: fx.Node
    base: fx.Node
    weight: fx.Node | None
    others: tuple[Product, ...]
    rest: tuple[fx.Node, ...]


class Accumulate:
    name: ClassVar[str] = "accumulate"
    stage: ClassVar[str] = "joint"

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        rejected = STRICT if context.numerics == "strict" else ""
        for found in _sums(graph):
            yield Site(found.node, rejected, found.weight, found, by_choice=True)

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        found: _Sum = site.plan
        with graph.inserting_before(found.node):
            result = found.base
            for product in found.others:
                result = emit(graph, ACCUMULATE, (result, product.lhs, product.rhs), product.node)
            for term in found.rest:
                result = emit(graph, ADD, (result, term), found.node)
        found.node.replace_all_uses_with(result)


def _sums(graph: fx.Graph) -> Iterator[_Sum]:
    """Every maximal sum of matrices with a quantized product and another among its terms."""
    for node, terms in sums(graph):
        mine = [term for term in terms if _is_read_here_alone(term, node)]
        base = next((term for term in mine if _weight(term) is not None), None)
        products = [as_product(term) for term in mine if term is not base]
        others = tuple(product for product in products if product is not None)
        if base is not None and others:
            used = {base, *(product.node for product in others)}
            rest = tuple(term for term in terms if term not in used)
            yield _Sum(node, base, _weight(base), others, rest)


def _weight(term: fx.Node) -> fx.Node | None:
    """The packed weight that a term multiplies with, decoded before or, for few rows, inside."""
    if term.target is bnb_graph.overload("gemm_4bit"):
        return bnb_graph.weight_of(term)
    product = as_product(term)
    return packed_weight(product.weight) if product is not None else None


def _is_read_here_alone(term: fx.Node, of: fx.Node) -> bool:
    """Nothing else reads it, and the sum neither broadcasts nor casts it."""
    if not is_tensor(term) or len(term.users) != 1:
        return False
    return tensor(term).dtype == tensor(of).dtype and same_shape(term, of)
