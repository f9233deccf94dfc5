"""Multiply in float32 what a CPU multiplies slowly in 16 bits.

torch gives products in bfloat16 to oneDNN where the CPU has instructions for them: on x86 from
AVX-512 on. For all others it has a loop of its own, which is slowest where the right operand's rows
are contiguous, as in most products of a backward pass: there a product in float32 takes a small
part of that time, casts included. The backward pass of attention consists of such products too;
its forward pass takes as long in both dtypes. The operands' values are exact in float32, and a
result is rounded once, so its error is no larger. What is computed in the same graph is written in
float32 and needs no cast, but twice the memory. Grouped products of experts in 16 bits stay as they
are: torch traces none in float32.

This is the last pass, because the others find a product by its operands, which its casts hide.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from inductor_q.capture.example import hint
from inductor_q.context import Context
from inductor_q.kernels.wide import multiplies_slowly
from inductor_q.passes.fold_lora import STRICT
from inductor_q.passes.graph import ADDMM, CAST, MM, emit, is_tensor, replace, tensor
from inductor_q.passes.runner import LOWERED, Site

aten = torch.ops.aten
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
#: What the pass computes in float32.
PRODUCTS = (MM, ADDMM, aten.bmm.default, aten.baddbmm.default, _ATTENTION)


class WidenProducts:
    name: ClassVar[str] = "widen_products"
    stage: ClassVar[str] = LOWERED

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        for node in graph.nodes:
            if node.target in PRODUCTS and _is_slow(node.args[0]):
                yield Site(node, _unwanted(node, context), provider="float32", by_choice=True)

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        node = site.node
        with graph.inserting_before(node):
            given: Any = (node.args, node.kwargs)
            args, kwargs = fx.node.map_arg(given, lambda n: _widened(graph, n, node))
            wide = emit(graph, node.target, args, node, **kwargs)
            if is_tensor(node):
                replace(node, emit(graph, CAST, (wide, tensor(node).dtype), node))
                return
            for item in list(node.users):
                part = emit(graph, operator.getitem, (wide, item.args[1]), item)
                replace(item, emit(graph, CAST, (part, tensor(item).dtype), item))


def _is_slow(node: Any) -> bool:
    return is_tensor(node) and multiplies_slowly(tensor(node))


def _unwanted(node: fx.Node, context: Context) -> str:
    if context.numerics == "strict":
        return STRICT
    if node.target is _ATTENTION:
        return ""
    left, right = (tensor(n) for n in node.args[-2:])
    least, count = context.threshold("widen_products.min_rows"), hint(left.shape[-2])
    if statically_known_true(right.stride(-2) == 1) and count < least:
        return f"{count} rows, fewer than widen_products.min_rows={least} of the preset"
    return ""


def _widened(graph: fx.Graph, node: fx.Node, before: fx.Node) -> fx.Node:
    """Return a tensor of 16 bits in float32, by the cast that stands there already, if any. A later
    one would move the product, and random numbers are drawn in the order of the graph."""
    if not _is_slow(node):
        return node
    for user in node.users:
        if user.target is CAST and user.args[1] is torch.float32 and user < before:
            return user
    return emit(graph, CAST, (node, torch.float32), node)
