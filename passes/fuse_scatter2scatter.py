"""Multiply with packed experts instead of dequantizing all of them.

transformers computes experts as a grouped product of sorted rows (`grouped_mm`) or by gathering an
expert's weights for each row (`batched_mm`). Either way over a dequantization becomes one
`qfuse::scatter2scatter` on the packed stack, forward and backward alike, so no expert is held in 16
bits and none is saved; `batched_mm` over dense experts too, whose gathered copies are saved for
backward otherwise. Where the rows of a grouped product are shown to be slots in sorted order, it
reads their tokens in place of copies, or adds up the slots of each token, weighted by its gates.
The gates' gradient, which is of those rows, is computed from the product of backward then.

Refused where the weights are dense and grouped (torch's product is the thing to run), and where
they train. It says too which kernel serves the products that a model has asked for itself.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import fx

from inductor_q.capture.expert_slots import match_gathered, match_summed
from inductor_q.capture.experts_graph import Batched, Grouped, match_batched, match_grouped
from inductor_q.context import Context
from inductor_q.formats import get_format
from inductor_q.kernels import PROVIDERS
from inductor_q.kernels.calls import DENSE
from inductor_q.kernels.provider import on_device
from inductor_q.passes.graph import CAST, MUL, RESHAPE, emit, tensor
from inductor_q.passes.runner import Site

OP = "scatter2scatter"
aten = torch.ops.aten


_Nodes = tuple[fx.Node, ...]


@dataclass
class _Once:
    """Nodes that are emitted once, for all the sites that share them."""

    emit: Callable[[fx.Graph, fx.Node], _Nodes]
    nodes: _Nodes | None = None

    def __call__(self, graph: fx.Graph, like: fx.Node) -> _Nodes:
        if self.nodes is None:
            self.nodes = self.emit(graph, like)
        return self.nodes


@dataclass
class _Shared:
    """What the sites of a graph have in common.

    gates_gradients: by a product of backward, the sums that read the result of the product which it
        is the backward of, and the rows of that: with d, w, x gradients, weights and rows, of
        sums d . (x @ w) the result is not made any more, and they become (d @ w') . x.
    became: what is in place of a node that a site was matched on.
    """

    emitted: dict[tuple[Any, ...], _Once] = field(default_factory=dict)
    gates_gradients: dict[fx.Node, tuple[fx.Node, fx.Node]] = field(default_factory=dict)
    became: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def once(self, emit: Callable[..., _Nodes], *key: Any) -> _Once:
        return self.emitted.setdefault((emit, *key), _Once(functools.partial(emit, *key)))

    def groups(self, offs: fx.Node, x: fx.Node, rows: fx.Node) -> _Once:
        """Of all products with the ends `offs` of groups and as many rows as `x`.

        How many is asked of `rows`, which is as long: `x` may not be made any more.
        """
        key = (_emit_groups, offs, str(tensor(x).shape[0]))
        return self.emitted.setdefault(key, _Once(functools.partial(_emit_groups, offs, rows)))


@dataclass(frozen=True)
class _Plan:
    """`old` becomes `product` of `x`, its slots times `gates`.

    `dim` is the one more dimension that both have. `gates_gradient` are sums, and the rows that the
    result is multiplied with for them; then it is multiplied with `column`.
    """

    product: Grouped | Batched
    x: fx.Node
    old: fx.Node
    routing: tuple[_Once, ...]  # order, inverse, offsets and tiles
    shared: _Shared
    top_k: int = 1
    grouped_in: bool = False
    grouped_out: bool = False
    dim: int | None = None
    gates: fx.Node | None = None
    column: fx.Node | None = None
    gates_gradient: tuple[fx.Node, fx.Node] | None = None


class FuseScatter2Scatter:
    name: ClassVar[str] = "fuse_scatter2scatter"
    stage: ClassVar[str] = "joint"

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        shared = _Shared()
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
                yield from _grouped_sites(node, found, shared, context)
            elif isinstance(found, Batched):
                yield _site(node, _batched_plan(node, found, shared), context)

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        node, wanted = site.node, context.kernel(OP)
        if site.plan is None:
            node.args = (*node.args[:-1], wanted if wanted != "auto" else node.args[-1])
            return
        plan: _Plan = site.plan
        stack, became = plan.product.stack, plan.shared.became
        with graph.inserting_before(node):
            x = became.get(plan.x, plan.x)
            if plan.dim is not None:
                x = emit(graph, aten.squeeze.dim, (x, plan.dim), node)
            gates = plan.gates
            if gates is not None:
                gates = emit(graph, RESHAPE, (gates, [-1, plan.top_k]), node)
            args = (
                x,
                list(stack.operands),
                stack.format,
                list(stack.shape),
                plan.product.transposed,
                *itertools.chain(*(once(graph, node) for once in plan.routing)),
                plan.top_k,
                plan.grouped_in,
                plan.grouped_out,
                None,
                None,
                1.0,
                None,
                gates,
                wanted,
            )
            both = emit(graph, torch.ops.qfuse.scatter2scatter.default, args, node)
            value = emit(graph, operator.getitem, (both, 0), node)
            if plan.dim is not None:
                value = emit(graph, aten.unsqueeze.default, (value, plan.dim), node)
            if plan.gates_gradient is not None:
                sums, rows = plan.gates_gradient
                dots = emit(graph, MUL, (value, became.get(rows, rows)), node)
                became[sums] = emit(graph, aten.sum.dim_IntList, (dots, [1], True), node)
                sums.replace_all_uses_with(became[sums])
            if plan.column is not None:
                value = emit(graph, MUL, (value, plan.column), node)
        became[plan.old] = value
        plan.old.replace_all_uses_with(value)


def _grouped_sites(
    node: fx.Node, product: Grouped, shared: _Shared, context: Context
) -> Iterator[Site]:
    """The product, and why its rows stay sorted where they need not."""
    x, old = product.x, node
    if product.part is not None:
        old = next(user for user in node.users if user.args[1] == product.part)
    gathered, gradient = match_gathered(product), None
    slots = gathered
    if gathered is None:
        slots, gradient = match_summed(old, product)
    if slots is None or isinstance(slots, str):
        if slots is not None:
            yield Site(node, slots, by_choice=True)
        routing = shared.once(_emit_sorted, x), shared.groups(product.offs, x, x)
        plan = _Plan(product, x, old, routing, shared, grouped_in=True, grouped_out=True)
        yield _site(node, plan, context)
        return
    order = slots.order
    routing = shared.once(_emit_slots, order), shared.groups(product.offs, x, order)
    plan = _Plan(product, x, old, routing, shared, slots.top_k)
    if gathered is not None:
        plan = replace(
            plan,
            x=slots.tokens,
            grouped_out=True,
            column=slots.column,
            gates_gradient=shared.gates_gradients.get(node),
        )
    else:
        plan = replace(plan, old=slots.tokens, grouped_in=True, gates=slots.gates)
    if gradient is not None:
        shared.gates_gradients[gradient.back] = (gradient.sums, x)
    yield _site(node, plan, context)


def _batched_plan(node: fx.Node, product: Batched, shared: _Shared) -> _Plan:
    routing = shared.once(_emit_route, product.ids, product.stack.shape[0])
    return _Plan(product, product.x, node, (routing,), shared, dim=product.dim)


def _site(node: fx.Node, plan: _Plan, context: Context) -> Site:
    stack = plan.product.stack
    provider = _provider(plan.x, stack.format, context)
    return Site(node, weight=stack.operands[0], plan=plan, provider=provider)


def _provider(x: Any, format: str, context: Context) -> str:
    """Who is asked first for weights in `format` on the device of `x`."""
    fmt = None if format == DENSE else get_format(format)
    wanted, listed = context.kernel(OP), on_device(PROVIDERS[OP], tensor(x).device.type)
    order = sorted(listed, key=lambda p: p.name != wanted)
    return next(p.name for p in order if not p.missing() and not p.unknown(fmt))


def _emit_sorted(x: fx.Node, graph: fx.Graph, like: fx.Node) -> _Nodes:
    """Order and inverse of rows that are sorted already, and stay so: neither is read."""
    order = _arange(graph, _rows(graph, x, like), torch.int64, like)
    return order, order


def _emit_slots(order: fx.Node, graph: fx.Graph, like: fx.Node) -> _Nodes:
    """Order and inverse of tokens whose slots are sorted by `order`, a permutation."""
    return order, _emit_inverse(graph, order, like)


def _emit_groups(offs: fx.Node, rows: fx.Node, graph: fx.Graph, like: fx.Node) -> _Nodes:
    """Offsets and tiles of groups that end at `offs`."""
    offsets = emit(graph, aten.constant_pad_nd.default, (offs, [1, 0]), like)
    return offsets, _emit_tiles(graph, offsets, rows, like)


def _emit_route(ids: fx.Node, num_experts: int, graph: fx.Graph, like: fx.Node) -> _Nodes:
    """`experts.route` of the indices of a gather."""
    # An index counts from the end where it is negative, and is in range otherwise.
    ids = emit(graph, aten.remainder.Scalar, (ids, num_experts), like)
    ids = emit(graph, CAST, (ids, torch.int32), like)
    both = emit(graph, aten.sort.stable, (ids,), like, stable=True)
    grouped, order = (emit(graph, operator.getitem, (both, i), like) for i in range(2))
    experts = _arange(graph, num_experts + 1, torch.int32, like)
    offsets = emit(graph, aten.searchsorted.Tensor, (grouped, experts), like, out_int32=True)
    tiles = _emit_tiles(graph, offsets, order, like)
    return order, _emit_inverse(graph, order, like), offsets, tiles


def _emit_inverse(graph: fx.Graph, order: fx.Node, like: fx.Node) -> fx.Node:
    places = _arange(graph, _rows(graph, order, like), torch.int64, like)
    return emit(graph, aten.scatter.src, (order, 0, order, places), like)


def _emit_tiles(graph: fx.Graph, offsets: fx.Node, rows: fx.Node, like: fx.Node) -> fx.Node:
    arguments = (offsets, _rows(graph, rows, like))
    return emit(graph, torch.ops.qfuse.tile_map.default, arguments, like)


def _rows(graph: fx.Graph, node: fx.Node, like: fx.Node) -> Any:
    rows = tensor(node).shape[0]
    return rows if isinstance(rows, int) else emit(graph, aten.sym_size.int, (node, 0), like)


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
