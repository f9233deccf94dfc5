"""Products of few rows read packed weights that the graph decodes: `dequantize -> mm` is a layer.

canonicalize has what libraries call a layer. Others decode a weight and multiply, as torchao's are
unwrapped; in inference each product of few rows with such a weight becomes `qfuse::linear`, where a
kernel reads it packed, and fuse_rows takes it from there. A weight that anything else reads is
decoded, so all its products are left. Numerics "strict" multiplies what was rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import fx

from inductor_q.capture.library import Weight
from inductor_q.context import Context
from inductor_q.passes.canonicalize import few_rows_by
from inductor_q.passes.graph import MM, arg, backward_nodes, emit, peel_transposes, replace, tensor
from inductor_q.passes.runner import Site

DEQUANTIZE = torch.ops.qfuse.dequantize.default
LINEAR = torch.ops.qfuse.linear.default


class ReadPacked:
    name: ClassVar[str] = "read_packed"
    stage: ClassVar[str] = "joint"

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        decodes = graph.find_nodes(op="call_function", target=DEQUANTIZE)
        if not decodes or context.numerics == "strict" or backward_nodes(graph):
            return
        for node in decodes:
            products = _products(node)
            served = [few_rows_by(arg(product, 0), _weight(node), context) for product in products]
            if served and all(served):
                weight = _weight(node).operands[0]
                yield Site(node, "", weight, products, True, provider=served[0], op="linear_rows")

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        weight = _weight(site.node)
        for product in site.plan:
            args = (arg(product, 0), list(weight.operands), weight.format, list(weight.shape), None)
            with graph.inserting_before(product):
                replace(product, emit(graph, LINEAR, args, product))
            graph.erase_node(product)
        for transposed in list(site.node.users):
            graph.erase_node(transposed)
        graph.erase_node(site.node)


def _weight(node: fx.Node) -> Weight:
    operands, name, shape, _ = node.args
    return Weight(tuple(operands), str(name), tuple(shape))  # type: ignore[arg-type]


def _products(node: fx.Node) -> list[fx.Node]:
    """Return the products `x @ node.t()` that are all that reads the weight; else nothing."""
    found: list[fx.Node] = []
    for user in node.users:
        matrix, transposed = peel_transposes(user)
        if matrix is not node or not transposed:
            return []
        found += user.users
    for product in found:
        if product.target is not MM or arg(product, 0) in node.users:
            return []
        if tensor(product).dtype != tensor(node).dtype:
            return []
    return found
