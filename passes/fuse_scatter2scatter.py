"""Multiply with packed experts instead of dequantizing all of them.

transformers computes experts as a grouped product of sorted rows (`grouped_mm`) or by gathering an
expert's weights for each row (`batched_mm`). Over a dequantization either becomes one
`qfuse::scatter2scatter` on the packed stack, forward and backward alike, so no expert is held in 16
bits and none is saved. `batched_mm` over dense experts becomes one too: its gathered copies would
be saved for backward. Where the graph shows which token each row of a grouped product belongs to
(`capture/expert_layers.py` has a diagram), the op reads the tokens in place of copies, or adds up
the slots of each token, weighted by its gates. Sums that autocast takes in float32 are taken so by
the op, too, and then have the 16 bits of every other product's result; where the model does not
round them, `qfuse.numerics="strict"` keeps its sums.

The pass refuses weights that are dense and grouped (torch's product is the thing to run), and those
that train. Products that a model calls itself are reported with the kernel that serves them. Sites
of dense experts are among the sites of a report, and not among its quantized layers. The first site
of a layer carries the plan of all its sites.

Ids of experts are int64 as top-k returns them, and a radix sort takes a pass for each byte of a
key: where they are the places of so few numbers, 16 bits are sorted, stably.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace as replace_fields
from typing import Any, ClassVar

import torch
from torch import fx

from inductor_q import capture
from inductor_q.capture.calls import call
from inductor_q.capture.example import example, example_product
from inductor_q.capture.expert_layers import ExpertLayer, Projection
from inductor_q.capture.experts_graph import ADAPTED_EXPERTS, DENSE_EXPERTS, Batched
from inductor_q.context import Context
from inductor_q.kernels.calls import DENSE
from inductor_q.kernels.expert_calls import ARGUMENTS, Scatter2Scatter, arguments, unchecked
from inductor_q.passes.graph import (
    CAST,
    MUL,
    RESHAPE,
    VIEWS,
    arg,
    emit,
    positions,
    replace,
    tensor,
)
from inductor_q.passes.runner import Site

OP = "scatter2scatter"
SCATTER2SCATTER = torch.ops.qfuse.scatter2scatter.default
aten = torch.ops.aten

#: The order of the slots, its inverse, the experts' offsets and their tiles.
_Routing = tuple[fx.Node, fx.Node, fx.Node, fx.Node]


class FuseScatter2Scatter:
    name: ClassVar[str] = "fuse_scatter2scatter"
    stage: ClassVar[str] = "joint"

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        layers, refused = capture.find_experts(graph)
        sites = [
            Site(node, reason, by_choice=True, plain=reason in (ADAPTED_EXPERTS, DENSE_EXPERTS))
            for node, reason in refused.items()
        ]
        for layer in layers:
            if context.numerics == "strict":
                layer = replace_fields(layer, projections=tuple(map(_as_exact, layer.projections)))
            for projection in layer.projections:
                node, stack = projection.product.node, projection.product.stack
                weight, plain = stack.operands[0], stack.format == DENSE
                if projection.reason:  # of a grouped product, whose experts are packed
                    sites.append(Site(node, projection.reason, by_choice=True))
                plan = layer if projection is layer.projections[0] else None
                provider = context.expert_kernel(_example(projection))
                served = Site(node, "", weight, plan, provider=provider, plain=plain, op=OP)
                sites.append(served)
        for node in graph.find_nodes(op="call_function", target=SCATTER2SCATTER):
            operands: Any = node.args[ARGUMENTS.index("operands")]
            plain = node.args[ARGUMENTS.index("format")] == DENSE
            provider = context.expert_kernel(unchecked(example(node.args)))
            sites.append(Site(node, "", operands[0], provider=provider, plain=plain, op=OP))
        order = positions(graph)
        yield from sorted(sites, key=lambda site: order[site.node])

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        if site.plan is not None:
            _emit_layer(graph, site.plan)


def _as_exact(projection: Projection) -> Projection:
    """Keep the sums that the model takes in a wider dtype than that of the rows."""
    sums, product = projection.sums, projection.product
    if sums is None or tensor(sums.tokens).dtype == tensor(product.result).dtype:
        return projection
    reason = "rows stay sorted: qfuse.numerics='strict' keeps their sums in the model's dtype"
    return replace_fields(projection, sums=None, reason=reason)


def _example(projection: Projection) -> Scatter2Scatter:
    """Make a call like the one that a projection becomes, to find who will serve it."""
    product, gathers = projection.product, projection.gathers
    return example_product(
        gathers.tokens if gathers else product.x,
        product.stack.operands,
        product.stack.format,
        product.stack.shape,
        dtype=tensor(product.x).dtype,
        transposed=product.transposed,
        top_k=projection.top_k,
        grouped_in=not (isinstance(product, Batched) or gathers),
        dim=product.dim if isinstance(product, Batched) else None,
    )


def _emit_layer(graph: fx.Graph, layer: ExpertLayer) -> None:
    """Emit one op per product of a layer; all of them share its routing."""
    first = layer.projections[0].product.node
    for order in dict.fromkeys(p.order for p in layer.projections if p.order):
        _sort_narrow_keys(graph, order)
    with graph.inserting_before(first):
        routings = _emit_routings(graph, layer, first)
    for projection in layer.projections:
        node, gathers, sums = projection.product.node, projection.gathers, projection.sums
        routing = routings[projection.order]
        with graph.inserting_before(node):
            value = _emit_projection(graph, projection, routing)
            for gradient in layer.gates_gradients:
                if gradient.back is node:
                    dots, dtype = emit(graph, MUL, (value, gradient.x), node), gradient.sums.kwargs
                    dots = emit(graph, aten.sum.dim_IntList, (dots, [1], True), node, **dtype)
                    replace(gradient.sums, dots)
            if gathers and gathers.column:
                value = emit(graph, MUL, (value, gathers.column), node)
            result = sums.tokens if sums else projection.product.result
            value = _emit_cast(graph, value, tensor(result).dtype, node)
        replace(result, value)
    for found in layer.unsorted:
        _, inverse, _, _ = routings[found.order]
        with graph.inserting_before(found.node):
            args = (found.values, [inverse])
            replace(found.node, emit(graph, aten.index.Tensor, args, found.node))


def _emit_projection(graph: fx.Graph, projection: Projection, routing: _Routing) -> fx.Node:
    """Emit the result of a projection; where it gathers weighted rows, without their weights."""
    product, gathers, sums = projection.product, projection.gathers, projection.sums
    node, stack, batched = product.node, product.stack, isinstance(product, Batched)
    x, gates = gathers.tokens if gathers else product.x, None
    x = _emit_cast(graph, x, tensor(product.x).dtype, node)
    if isinstance(product, Batched):
        x = emit(graph, aten.squeeze.dim, (x, product.dim), node)
    if sums and sums.gates:
        gates = emit(graph, RESHAPE, (sums.gates, [-1, sums.top_k]), node)
    order, inverse, offsets, tiles = routing
    args = arguments(
        x=x,
        operands=list(stack.operands),
        format=stack.format,
        shape=list(stack.shape),
        transposed=product.transposed,
        order=order,
        inverse=inverse,
        offsets=offsets,
        tiles=tiles,
        top_k=projection.top_k,
        grouped_in=not (batched or gathers),
        grouped_out=not (batched or sums),
        gates=gates,
    )
    both = emit(graph, SCATTER2SCATTER, args, node)
    value = emit(graph, operator.getitem, (both, 0), node)
    if isinstance(product, Batched):
        value = emit(graph, aten.unsqueeze.default, (value, product.dim), node)
    return value


def _emit_cast(graph: fx.Graph, x: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
    return x if tensor(x).dtype == dtype else emit(graph, CAST, (x, dtype), like)


def _emit_routings(
    graph: fx.Graph, layer: ExpertLayer, like: fx.Node
) -> dict[fx.Node | None, _Routing]:
    """Emit the routing of a layer for each order that its projections have, which may be None."""
    first = layer.projections[0].product
    orders: dict[fx.Node | None, fx.Node | None] = {p.order: p.order for p in layer.projections}
    if isinstance(first, Batched):
        offsets, orders[None] = _emit_sort(graph, first, like)
    else:
        offsets = emit(graph, aten.constant_pad_nd.default, (first.offs, [1, 0]), like)
    # An order has the number of rows, if there is one: copies of tokens may not be made any more.
    counted = next(filter(None, orders.values()), first.x)
    rows = tensor(counted).shape[0]
    if not isinstance(rows, int):
        rows = emit(graph, aten.sym_size.int, (counted, 0), like)
    tiles = emit(graph, torch.ops.qfuse.tile_map.default, (offsets, rows), like)
    places = _emit_arange(graph, rows, torch.int64, like)
    routings: dict[fx.Node | None, _Routing] = {}
    for key, order in orders.items():
        inverse = places  # neither is read where rows are sorted already
        if order is not None:
            inverse = emit(graph, aten.scatter.src, (order, 0, order, places), like)
        routings[key] = order or places, inverse, offsets, tiles
    return routings


def _sort_narrow_keys(graph: fx.Graph, order: fx.Node) -> None:
    """Sort the keys that `order` is of in int16, if they are the places that a top-k chose."""
    both = arg(order, 0)
    match call(both):
        case aten.sort.default, fx.Node() as keys if _is_narrow(keys):
            with graph.inserting_before(both):
                narrow = emit(graph, CAST, (keys, torch.int16), both)
                found = emit(graph, aten.sort.stable, (narrow,), both, stable=True)
                grouped, places = (emit(graph, operator.getitem, (found, i), both) for i in (0, 1))
                wide = emit(graph, CAST, (grouped, tensor(keys).dtype), both)
            for part in list(both.users):
                replace(part, places if part.args[1] else wide)


def _is_narrow(keys: fx.Node) -> bool:
    """Whether keys are places among fewer numbers than int16 has, in the last dimension."""
    while keys.target in VIEWS:
        keys = arg(keys, 0)
    match call(keys):
        case operator.getitem, fx.Node() as chosen, 1:
            match call(chosen):
                case aten.topk.default, fx.Node() as scores, _, *rest:
                    count, last = tensor(scores).shape[-1], tensor(scores).dim() - 1
                    is_last = not rest or rest[0] in (-1, last)
                    return is_last and isinstance(count, int) and count <= 1 << 15
    return False


def _emit_sort(graph: fx.Graph, product: Batched, like: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Emit the offsets of the experts and the order of the slots, as `experts.route` does."""
    num_experts = product.stack.shape[0]
    # An index counts from the end where it is negative, and is in range otherwise.
    ids = emit(graph, aten.remainder.Scalar, (product.ids, num_experts), like)
    ids = emit(graph, CAST, (ids, torch.int32), like)
    both = emit(graph, aten.sort.stable, (ids,), like, stable=True)
    grouped, order = (emit(graph, operator.getitem, (both, i), like) for i in range(2))
    experts = _emit_arange(graph, num_experts + 1, torch.int32, like)
    offsets = emit(graph, aten.searchsorted.Tensor, (grouped, experts), like, out_int32=True)
    return offsets, order


def _emit_arange(graph: fx.Graph, end: int | fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
    value = like.meta["val"]
    return emit(
        graph,
        torch.ops.prims.iota.default,
        (end,),
        like,
        start=0,
        step=1,
        dtype=dtype,
        device=(value if isinstance(value, torch.Tensor) else value[0]).device,
        requires_grad=False,
    )
