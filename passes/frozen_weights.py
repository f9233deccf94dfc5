"""Find frozen weights of 16 bits, and emit them in eight: LoRA on a model that is not quantized.

Such a weight is a parameter that does not train. Its cast is part of the graph: a scale for each
out-feature from the largest number of its row, then a kernel that Inductor makes, which reads the
weight and writes half as many bytes. Backward casts again rather than keep the forward's copy. The
adapters of a model are none, also where they do not train. The head is none either: its errors
reach the loss directly. It is a weight of that name, one that is tied to the embeddings, or one
whose product a softmax reads. Nor is a router, whose product a softmax or a top-k reads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from inductor_q.capture.dynamo import input_index
from inductor_q.context import Context
from inductor_q.kernels import rounding
from inductor_q.passes.graph import (
    ADDMM,
    CAST,
    LAYOUT,
    MM,
    PAD,
    SLICE,
    arg,
    backward_nodes,
    inline,
    is_tensor,
    peel_rows,
    peel_transposes,
    tensor,
)
from inductor_q.passes.products import Product, as_product
from inductor_q.passes.recompute import is_pointwise

aten = torch.ops.aten

# A softmax, or its first operation, and the choice of experts, which some routers make before it.
_CHOOSES = {aten._softmax.default, aten._log_softmax.default, aten.amax.default, aten.topk.default}
_SHOWS = {*LAYOUT, CAST, PAD, SLICE}  # values as they are, or some of them
HEAD = "lm_head"


def frozen_products(graph: fx.Graph, context: Context) -> Iterator[Product]:
    """Yield the products with frozen weights, that of `addmm` among them."""
    inputs = {
        node
        for node in graph.find_nodes(op="placeholder")
        if input_index(node) in context.frozen and not hasattr(node.meta.get("desc"), "base")
    }
    if not inputs:
        return
    found = [p for p in _products(graph) if peel_transposes(p.rhs)[0] in inputs]
    backward = backward_nodes(graph)
    heads = {node for node in inputs if _is_named_head(node, context)}
    for product in found:
        if product.node not in backward and _is_chosen_from(product.node):
            heads.add(peel_transposes(product.rhs)[0])
    yield from (p for p in found if peel_transposes(p.rhs)[0] not in heads)


def emit_scale_of_rows(
    graph: fx.Graph, weight: fx.Node, like: fx.Node, dtype: torch.dtype
) -> fx.Node:
    """Emit the scales [N] of a weight's rows."""
    scales = functools.partial(rounding.scale_of_rows, dtype=dtype)
    (scale,) = inline(graph, scales, [weight], like)
    _never_keep(scale, weight, below=weight)
    return scale


def emit_cast_of_weight(
    graph: fx.Graph,
    weight: fx.Node,
    scale: fx.Node,
    like: fx.Node,
    dtype: torch.dtype,
    *,
    transposed: bool,
) -> fx.Node:
    """Emit the codes of a weight under its scales, transposed where asked for."""
    cast = functools.partial(rounding.cast_weight, dtype=dtype, transposed=transposed)
    (codes,) = inline(graph, cast, [weight, scale], like)
    _never_keep(codes, weight, below=scale)
    return codes


def _never_keep(result: fx.Node, weight: fx.Node, *, below: fx.Node) -> None:
    """Compute again in backward what `result` follows from and has the weight's size."""
    todo = [result]
    while todo:
        node = todo.pop()
        if node is not weight and node is not below:
            todo += node.all_input_nodes
            if tensor(node).numel() == tensor(weight).numel():
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _products(graph: fx.Graph) -> Iterator[Product]:
    for node in graph.find_nodes(op="call_function", target=MM):
        if product := as_product(node):
            yield product
    for node in graph.find_nodes(op="call_function", target=ADDMM):
        if not node.kwargs and is_tensor(node):
            yield Product(node, arg(node, 1), arg(node, 2), peel_rows(arg(node, 1)))


def _is_named_head(weight: fx.Node, context: Context) -> bool:
    tied = any(user.target is aten.embedding.default for user in weight.users)
    return tied or context.module_path(weight).rpartition(".")[2] == HEAD


def _is_chosen_from(product: fx.Node) -> bool:
    """Whether a softmax or a top-k reads a product, behind element-wise operations and views."""
    todo, seen = [product], set[Any]()
    while todo:
        node = todo.pop()
        for user in node.users:
            if user.target in _CHOOSES:
                return True
            if user not in seen and (is_pointwise(user) or user.target in _SHOWS):
                seen.add(user)
                todo.append(user)
    return False
