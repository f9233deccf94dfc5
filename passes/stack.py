"""Products that share an input become one: the base of stack_adapters and stack_gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from torch import fx

from inductor_q.context import Context
from inductor_q.passes.graph import (
    CHAINED,
    MM,
    SLICE,
    backward_nodes,
    computed_from,
    emit,
    positions,
    tensor,
)
from inductor_q.passes.products import Product
from inductor_q.passes.runner import Site


class Stack(ABC):
    """A pass that stacks products. It refuses those of which one is computed from another's result,
    and stacks those of forward apart from those that depend on a tangent: forward has none, and
    under `torch.func.grad` both may read one input.

    `side` is the dimension of the results along which they are stacked.
    """

    name: ClassVar[str]
    stage: ClassVar[str] = "joint"
    side: ClassVar[int]

    @abstractmethod
    def groups(self, graph: fx.Graph) -> Iterator[list[Product]]:
        """Find groups of products that share an input and a dtype."""

    @abstractmethod
    def arrange(self, members: Sequence[Product]) -> list[Product]:
        """Return the members in the order in which their results shall lie."""

    @abstractmethod
    def operands(self, graph: fx.Graph, members: Sequence[Product]) -> tuple[fx.Node, fx.Node]:
        """Emit both sides of the stacked product at the insertion point."""

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        order, backward = positions(graph), backward_nodes(graph)
        for group in self.groups(graph):
            for side in (True, False):
                members = [m for m in group if (m.node in backward) is side]
                if len(members) > 1:
                    inputs = [n for m in members for n in (m.lhs, m.rhs)]
                    chained = computed_from(inputs, [m.node for m in members], order)
                    yield Site(members[0].node, CHAINED if chained else "", plan=members)

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        members = self.arrange(site.plan)
        if len(members) < 2:
            return
        with graph.inserting_before(site.node):
            product = emit(graph, MM, self.operands(graph, members), members[0].node)
            start = 0
            for member in members:
                end = start + tensor(member.node).shape[self.side]
                part = emit(graph, SLICE, (product, self.side, start, end), member.node)
                member.node.replace_all_uses_with(part)
                start = end
