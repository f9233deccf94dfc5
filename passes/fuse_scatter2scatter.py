"""Multiply with packed experts instead of dequantizing all of them.

transformers computes experts as a grouped product of sorted rows (`grouped_mm`) or by gathering an
expert's weights for each row (`batched_mm`). Either way over a dequantization becomes one
`qfuse::scatter2scatter` on the packed stack, forward and backward alike, so no expert is held in 16
bits and none is saved; `batched_mm` over dense experts too, whose gathered copies are saved for
backward otherwise.

Refused where the weights are dense and grouped (torch's product is the thing to run), and where
they train. It says too which kernel serves the products that a model has asked for itself.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from inductor_q.capture.experts_graph import (
    Batched,
    Grouped,
    match_batched,
    match_grouped,
)
from inductor_q.diagnostics.context import Context
from inductor_q.formats import get_format
from inductor_q.kernels import scatter2scatter_kernels
from inductor_q.ops.scatter2scatter import DENSE
from inductor_q.passes.graph import CAST, emit, tensor
from inductor_q.passes.runner import Site

OP = "scatter2scatter"
aten = torch.ops.aten


@dataclass
class _Route:
    """The routing of `batched_mm` over one tensor of expert ids: emitted once for all its sites."""

    ids: fx.Node
    num_experts: int
    nodes: tuple[fx.Node, fx.Node, fx.Node] | None = None


@dataclass(frozen=True)
class _Plan:
    product: Grouped | Batched
    route: _Route | None = None


class FuseScatter2Scatter:
    name: ClassVar[str] = "fuse_scatter2scatter"
    stage: ClassVar[str] = "joint"

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        routes: dict[tuple[fx.Node, int], _Route] = {}
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            if node.target is torch.ops.qfuse.scatter2scatter.default:
                x, operands, name, *_ = node.args
                yield Site(node, weight=operands[0], provider=_provider(x, name, context))
                continue
            found = match_grouped(node) or match_batched(node)
            if isinstance(found, str):
                yield Site(node, found, by_choice=True)
            elif isinstance(found, Grouped):
                yield _site(node, _Plan(found), context)
            elif isinstance(found, Batched):
                e = found.stack.shape[0]
                route = routes.setdefault((found.ids, e), _Route(found.ids, e))
                yield _site(node, _Plan(found, route), context)

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        node, wanted = site.node, context.kernel(OP)
        if site.plan is None:
            node.args = (*node.args[:-1], wanted if wanted != "auto" else node.args[-1])
            return
        product: Grouped | Batched = site.plan.product
        with graph.inserting_before(node):
            if isinstance(product, Grouped):
                # Rows are sorted already, and stay so: the order itself is not read.
                rows = tensor(product.x).shape[0]
                if not isinstance(rows, int):
                    rows = emit(graph, aten.sym_size.int, (product.x, 0), node)
                order = _arange(graph, rows, torch.int64, node)
                offsets = emit(graph, aten.constant_pad_nd.default, (product.offs, [1, 0]), node)
                x, routing = product.x, (order, order, offsets)
            else:
                x = emit(graph, aten.squeeze.dim, (product.x, product.dim), node)
                routing = _emit_route(graph, site.plan.route, node)
            stack, grouped = product.stack, isinstance(product, Grouped)
            args = (
                x,
                list(stack.operands),
                stack.format,
                list(stack.shape),
                product.transposed,
                *routing,
                1,
                grouped,
                grouped,
                None,
                None,
                1.0,
                None,
                None,
                wanted,
            )
            both = emit(graph, torch.ops.qfuse.scatter2scatter.default, args, node)
            value = emit(graph, operator.getitem, (both, 0), node)
            if isinstance(product, Batched):
                value = emit(graph, aten.unsqueeze.default, (value, product.dim), node)
        old = node
        if isinstance(product, Grouped) and product.part is not None:
            old = next(user for user in node.users if user.args[1] == product.part)
        old.replace_all_uses_with(value)


def _site(node: fx.Node, plan: _Plan, context: Context) -> Site:
    stack = plan.product.stack
    provider = _provider(plan.product.x, stack.format, context)
    return Site(node, weight=stack.operands[0], plan=plan, provider=provider)


def _provider(x: Any, format: str, context: Context) -> str:
    """Who is asked first for weights in `format` on the device of `x`."""
    fmt = None if format == DENSE else get_format(format)
    kernels = scatter2scatter_kernels(tensor(x).device.type, context.kernel(OP))
    return next(k.name for k in kernels if not k.available() and not k.decodes(fmt))


def _emit_route(graph: fx.Graph, route: _Route, like: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """`experts.route` of the indices of a gather, as nodes, once."""
    if route.nodes is None:
        # An index counts from the end where it is negative, and is in range otherwise.
        ids = emit(graph, aten.remainder.Scalar, (route.ids, route.num_experts), like)
        ids = emit(graph, CAST, (ids, torch.int32), like)
        both = emit(graph, aten.sort.stable, (ids,), like, stable=True)
        grouped, order = (emit(graph, operator.getitem, (both, i), like) for i in range(2))
        experts = _arange(graph, route.num_experts + 1, torch.int32, like)
        offsets = emit(graph, aten.searchsorted.Tensor, (grouped, experts), like, out_int32=True)
        rows: Any = tensor(route.ids).shape[0]
        if not isinstance(rows, int):
            rows = emit(graph, aten.sym_size.int, (route.ids, 0), like)
        places = _arange(graph, rows, torch.int64, like)
        inverse = emit(graph, aten.scatter.src, (order, 0, order, places), like)
        route.nodes = (order, inverse, offsets)
    return route.nodes


def _arange(graph: fx.Graph, end: Any, dtype: torch.dtype, like: fx.Node) -> fx.Node:
    return emit(
        graph,
        torch.ops.prims.iota.default,
        (end,),
        like,
        start=0,
        step=1,
        dtype=dtype,
        device=_device(like),
        requires_grad=False,
    )


def _device(node: fx.Node) -> torch.device:
    value = node.meta["val"]
    first: torch.Tensor = value[0] if isinstance(value, (tuple, list)) else value
    return first.device
