"""Find products with stacks of frozen weights, packed or in 16 bits, of which few are in eight.

They are those of experts, `qfuse::scatter2scatter` and torch's grouped product; batched products,
of one matrix for each head as well; and products with one matrix of a stack, as of a loop over its
experts, or with all of them as one. Weights that train, those of adapters among them, are no such
stacks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from inductor_q.capture.dynamo import input_index
from inductor_q.context import Context
from inductor_q.kernels.calls import DENSE
from inductor_q.kernels.expert_calls import ARGUMENTS
from inductor_q.passes.fuse_scatter2scatter import SCATTER2SCATTER
from inductor_q.passes.graph import ADDMM, CAST, LAYOUT, MM, SLICE, arg, is_tensor, tensor
from inductor_q.passes.products import DEQUANTIZE, packed_weight

aten = torch.ops.aten

_OPERANDS, _FORMAT = ARGUMENTS.index("operands"), ARGUMENTS.index("format")
EXPERTS = (
    "a grouped product of torch's stays in 16 bits: only packed experts, which qfuse multiplies, "
    "are computed in FP8"
)
BATCHED = "a batched product: there is no kernel in eight bits for it"
STACKED = (
    "the weight is part of a stack, or a view of one: only weights that are matrices of their own "
    "are computed in eight bits"
)

#: By operator: which argument holds the weights, and why the product stays in 16 bits.
_TORCH = {
    aten._grouped_mm.default: (1, EXPERTS),
    aten.bmm.default: (1, BATCHED),
    aten.baddbmm.default: (2, BATCHED),
    MM: (1, STACKED),
    ADDMM: (2, STACKED),
}
_SHOWS = {  # values of a stack as they are, or some of them
    *LAYOUT,
    CAST,
    SLICE,
    aten.transpose.int,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.select.int,
    aten.unbind.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    operator.getitem,
    aten.index.Tensor,
    aten.index_select.default,
}


@dataclass(frozen=True)
class StackProduct:
    """A product with a stack of frozen weights.

    stack: the input that holds them.
    plain: whether they are in 16 bits.
    reason: why they stay so; empty for `qfuse::scatter2scatter` (`experts_in_fp8` has its reasons).
    """

    node: fx.Node
    stack: fx.Node
    plain: bool
    reason: str


def stack_products(graph: fx.Graph, context: Context) -> Iterator[StackProduct]:
    for node in graph.find_nodes(op="call_function", target=SCATTER2SCATTER):
        stack = node.args[_OPERANDS][0]
        plain = node.args[_FORMAT] == DENSE
        if found := _frozen(stack, context) if plain else stack:
            yield StackProduct(node, found, plain, "")
    for target, (place, reason) in _TORCH.items():
        for node in graph.find_nodes(op="call_function", target=target):
            below = _shown(arg(node, place))
            if reason is STACKED and not (is_tensor(below) and tensor(below).dim() > 2):
                continue
            plain = below.target is not DEQUANTIZE
            if found := _frozen(below, context) if plain else packed_weight(below):
                yield StackProduct(node, found, plain, reason)


def _shown(node: fx.Node) -> fx.Node:
    """Return the tensor whose values a node shows."""
    while node.target in _SHOWS:
        node = arg(node, 0)
    return node


def _frozen(node: fx.Node, context: Context) -> fx.Node | None:
    """Return an input that is a stack of frozen weights of 16 bits, or None for anything else."""
    node = _shown(node)
    is_frozen = node.op == "placeholder" and input_index(node) in context.frozen
    return node if is_frozen and not hasattr(node.meta.get("desc"), "base") else None
