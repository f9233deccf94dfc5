"""Find products with stacks of frozen experts, packed or in 16 bits, to say why none is in eight.

They are `qfuse::scatter2scatter`, torch's grouped product, and a batched product with experts that
were gathered. Weights that train, those of adapters among them, are no such stacks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from inductor_q.capture.dynamo import input_index
from inductor_q.context import Context
from inductor_q.kernels.calls import ARGUMENTS, DENSE
from inductor_q.passes.fuse_scatter2scatter import SCATTER2SCATTER
from inductor_q.passes.graph import CAST, PERMUTE, VIEWS, arg
from inductor_q.passes.products import DEQUANTIZE, packed_weight

aten = torch.ops.aten

_OPERANDS, _FORMAT = ARGUMENTS.index("operands"), ARGUMENTS.index("format")
_TORCH = (aten._grouped_mm.default, aten.bmm.default)
_SHOWS = {*VIEWS, PERMUTE, CAST, aten.transpose.int, aten.index.Tensor, aten.index_select.default}


def expert_products(graph: fx.Graph, context: Context) -> Iterator[tuple[fx.Node, fx.Node, bool]]:
    """Yield each product, the input that holds its experts, and whether they are in 16 bits."""
    for node in graph.find_nodes(op="call_function", target=SCATTER2SCATTER):
        stack = node.args[_OPERANDS][0]
        plain = node.args[_FORMAT] == DENSE
        if found := _frozen(stack, context) if plain else stack:
            yield node, found, plain
    for target in _TORCH:
        for node in graph.find_nodes(op="call_function", target=target):
            below = arg(node, 1)
            while below.target in _SHOWS:
                below = arg(below, 0)
            plain = below.target is not DEQUANTIZE
            if found := _frozen(below, context) if plain else packed_weight(below):
                yield node, found, plain


def _frozen(node: fx.Node, context: Context) -> fx.Node | None:
    """Return an input that is a stack of frozen weights of 16 bits, or None for anything else."""
    while node.target in _SHOWS:
        node = arg(node, 0)
    is_frozen = node.op == "placeholder" and input_index(node) in context.frozen
    return node if is_frozen and not hasattr(node.meta.get("desc"), "base") else None
