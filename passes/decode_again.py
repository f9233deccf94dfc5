"""Decode a weight twice in backward where two wide operands hold it: recompute's and backward's.

Under checkpointing backward multiplies with a weight twice, in the segment that is computed again
and for the gradient of its input. The partitioner leaves one dequantization to both. But extend_k
has each product read the weight from a wide buffer of its own, and a decode can write into one: the
other would be a copy, which moves more bytes than a decode reads, and the first buffer would live
until the gradient arrives, with those of the whole layer. So each gets its own.

Where at most one of the products reads a wide buffer, both read one decode of the weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import fx

from inductor_q.context import Context
from inductor_q.passes.graph import CAT
from inductor_q.passes.products import DEQUANTIZE, packed_weight
from inductor_q.passes.recompute import RECOMPUTED
from inductor_q.passes.runner import Site


class DecodeAgain:
    name: ClassVar[str] = "decode_again"
    stage: ClassVar[str] = "backward"

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        for node in graph.find_nodes(op="call_function", target=DEQUANTIZE):
            wide = [user for user in node.users if user.target is CAT]
            of_gradients = [u for u in wide if any(map(_is_of_gradient, u.users))]
            if of_gradients and len(of_gradients) < len(wide):
                yield Site(node, weight=packed_weight(node), plan=tuple(of_gradients))

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        for user in site.plan:
            with graph.inserting_before(user):
                user.replace_input_with(site.node, graph.node_copy(site.node))


def _is_of_gradient(reader: fx.Node) -> bool:
    """Whether what reads an operand is not computed again, as an operand without adapters is."""
    return reader.meta.get("recompute") not in RECOMPUTED
