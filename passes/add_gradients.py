"""Add the gradient that adapters under dropout give their input to a product of the same sum.

`dX = dY W + dropout(dP A)`. The second term, written by itself, is as large as x, and it is in
memory beside the first until the kernels that read their sum have run. `qfuse::add_dropout_grad_x`
adds it to the product in place. That moves as many bytes: the op reads the product as well, and
what reads the sum reads one tensor instead of two. (A product that adds to what is there would do
the same, but torch has none in FP8.)

The term is added in float32 and not rounded by itself; the sum is rounded to the dtype of the
product. Without the pass both terms are rounded, and so is their sum, unless the kernel that adds
them goes on computing. A sum in float32 of a product in 16 bits is refused, since it would be
rounded once more than without. Products that something else reads are refused too, and sums without
a product that has memory of its own. (A product in int8 has none: the kernel that reads it applies
its scales.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import fx

from inductor_q.context import Context
from inductor_q.ops.add_product import owns_memory
from inductor_q.passes.fuse_dropout import GRAD_X
from inductor_q.passes.graph import arg, emit, replace, same_shape, shows, single_user, tensor
from inductor_q.passes.products import sums
from inductor_q.passes.runner import Site
from inductor_q.passes.sum_products import drop_summand, is_sum

ADD_GRAD_X = torch.ops.qfuse.add_dropout_grad_x.default
ALONE = "the gradient is added to no product that has memory of its own"
READ = "something else reads the product that the gradient is added to"
WIDE = "the sum is in float32, and the product in 16 bits, to which it would be rounded"


class AddGradients:
    name: ClassVar[str] = "add_gradients"
    stage: ClassVar[str] = "joint"

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        gradients = graph.find_nodes(op="call_function", target=GRAD_X)
        added = [terms for _, terms in sums(graph)] if gradients else []
        beside = {term: terms for terms in added for term in terms}
        for node in gradients:
            term = _shown(node)
            base = _base(node, term, beside.get(term, ()))
            reason, plan = (base, None) if isinstance(base, str) else ("", base)
            provider = "qfuse.dropout_grad_x"
            yield Site(node, reason, plan=plan, by_choice=True, provider=provider)

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        with graph.inserting_before(site.node):
            total = emit(graph, ADD_GRAD_X, (site.plan, *site.node.args), site.node)
        base = arg(total, 0)  # the product, or with what other adapters' gradients are added to it
        replace(base, total)
        total.update_arg(0, base)
        drop_summand(graph, site.node)


def _base(gradient: fx.Node, term: fx.Node, terms: Sequence[fx.Node]) -> fx.Node | str:
    """Return the last product that a gradient, shown as `term`, may be added to among the `terms`
    of one sum, or why there is none."""
    found: list[fx.Node] = []
    reasons = {ALONE}
    for other in terms if _is_added(term) else ():
        product, alone = _source(other)
        if not owns_memory(product) or not same_shape(product, gradient):
            continue
        if len({tensor(node).dtype for node in (gradient, term, other, product)}) > 1:
            reasons.add(WIDE)
        elif not alone:
            reasons.add(READ)
        elif _is_added(other):
            found.append(product)
    return max(found) if found else next(r for r in (READ, WIDE, ALONE) if r in reasons)


def _is_added(term: fx.Node) -> bool:
    """Whether all that reads a term adds it to another one of its shape and dtype."""
    reader = single_user(term)
    return reader is not None and is_sum(reader)


def _shown(node: fx.Node) -> fx.Node:
    """Return the last of the views and casts to float32 through which alone a node is read."""
    while (reader := single_user(node)) is not None and shows(reader):
        node = reader
    return node


def _source(term: fx.Node) -> tuple[fx.Node, bool]:
    """Return what a term shows, and whether nothing else does or reads it."""
    alone = single_user(term) is not None
    while shows(term):
        term = arg(term, 0)
        alone = alone and single_user(term) is not None
    return term, alone
