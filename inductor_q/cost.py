"""Estimate how long operations take, in bytes of memory traffic."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from inductor_q.capture.example import example, hint
from inductor_q.liveness import Kinds, storages
from inductor_q.passes.add_adapters import ADD_PRODUCT
from inductor_q.passes.extend_k import EXTEND_DROPPED, WIDE
from inductor_q.passes.fuse_dropout import PROJECT
from inductor_q.passes.fuse_scatter2scatter import SCATTER2SCATTER
from inductor_q.passes.graph import argument

aten = torch.ops.aten
FLEX = torch.ops.higher_order.flex_attention
FLASH_BACKWARD = torch.ops.qfuse.flash_attention_backward.default

#: Products, and which argument has the summed dimension as its last.
_PRODUCTS: Mapping[object, int] = {
    aten.mm.default: 0,
    aten.bmm.default: 0,
    aten._scaled_mm.default: 0,
    aten._grouped_mm.default: 0,
    aten.addmm.default: 1,
    aten.baddbmm.default: 1,
    ADD_PRODUCT: 1,
}

#: How many operations of a product take as long as one byte of memory traffic, within a factor of
#: two on the GPUs of the last ten years. Attention computes at half of a product's rate.
_OPERATIONS_BY_BYTE = 200
_ATTENTION = 2


def node_bytes(node: fx.Node) -> int:
    """Return the size of what a node computes, views with all that they look at."""
    return sum(storages(node).values())


def cost_of(node: fx.Node) -> float | None:
    """Return how long an operation takes, in bytes of memory traffic; None where it is unknown or
    where computing it again would give something else."""
    name = getattr(node.target, "__name__", "")
    moved = node_bytes(node) + sum(map(node_bytes, node.all_input_nodes))
    if node.target is aten.embedding.default:
        moved = 2 * node_bytes(node)
    if name.startswith("_scaled_dot_product_") or node.target in (FLEX, FLASH_BACKWARD):
        first = 1 if node.target is FLASH_BACKWARD else 0
        query, key = (example(node.args[first + i]) for i in (0, 1))
        seen = key.shape[-2] / (2 if argument(node, "is_causal") else 1)
        operations = 4 * query.numel() * seen * _ATTENTION
    elif node.target is SCATTER2SCATTER:
        result, _ = node.meta["val"]
        operations = 2 * hint(result.numel()) * hint(example(node.args[0]).shape[-1])
    elif node.target in (PROJECT, EXTEND_DROPPED):
        operations = 2 * example(node.args[0]).numel() * example(node.args[3]).shape[0]
    elif (place := _PRODUCTS.get(node.target)) is not None:
        operations = 2 * example(node).numel() * example(node.args[place]).shape[-1]
    elif node.target is aten.convolution.default or torch.Tag.nondeterministic_seeded in getattr(
        node.target, "tags", ()
    ):
        return None
    elif getattr(node.target, "namespace", "") in ("aten", "prims") or node.target in WIDE:
        operations = 0
    else:
        return None
    return float(max(moved, operations / _OPERATIONS_BY_BYTE))


def finish_times(graph: fx.Graph) -> list[float]:
    """Return when each node of a graph has been computed, where one follows the other. What is not
    known to take long takes as long as reading and writing does."""
    kinds, now, times = Kinds(), 0.0, []
    for node in graph.nodes:
        fused = kinds.is_view(node) or (kinds.is_fusible(node) and kinds.is_fused(node))
        if node.op == "call_function" and not fused:
            moved = node_bytes(node) + sum(map(node_bytes, node.all_input_nodes))
            now += cost_of(node) or float(moved)
        times.append(now)
    return times
