"""Keep of a checkpointed segment what is small beside the input that it is computed from again.

Checkpointing computes a segment again in backward, and all of it, in a graph: torch marks every
node of a segment. Some values are cheap to keep, and save more than their share:

- an adapter's projection `x A'`: r columns beside the input's thousands, where computing it again
  reads the whole input, and under dropout makes its mask again;
- which experts each token of a mixture chooses, by which gates, and the order of its rows: a few
  numbers a token, for which many small kernels would choose and sort again. Where ranks share the
  experts they would also ask each other again, so there it is always kept: whether a rank asks
  must not depend on its own sizes, or others wait for it;
- what the rest of the model reads of the last segment, as eager mode keeps it: else the segment's
  last product, which no gradient needs, is computed again;
- the result of attention and its logsumexp, which are as large as the segment's input: from so many
  positions on as `keep_checkpointed.min_positions` says. One without the other spares nothing.

What the user's own policy (`context_fn`) says of a value is left as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from inductor_q.capture.example import hint
from inductor_q.context import Context
from inductor_q.kernels.expert_calls import ARGUMENTS
from inductor_q.ops.exchange import Exchange
from inductor_q.passes.extend_k import WIDE
from inductor_q.passes.fuse_dropout import PROJECT
from inductor_q.passes.fuse_scatter2scatter import SCATTER2SCATTER
from inductor_q.passes.graph import VIEWS, arg, backward_nodes, tensor
from inductor_q.passes.products import as_product, is_projection
from inductor_q.passes.recompute import is_checkpointed
from inductor_q.passes.runner import Site

aten = torch.ops.aten

PLAN = torch.ops.qfuse.plan_exchange.default
TO_EXPERTS = torch.ops.qfuse.to_experts.default

_ATTENTION = "_scaled_dot_product_"


class KeepCheckpointed:
    name: ClassVar[str] = "keep_checkpointed"
    stage: ClassVar[str] = "partition"

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        tagged = [n for n in graph.nodes if is_checkpointed(n)]
        backward = backward_nodes(graph) if tagged else set()
        inside = [n for n in tagged if n not in backward]
        outside = _outside(graph, set(inside), backward)
        plans = set(graph.find_nodes(op="call_function", target=PLAN)) if tagged else set()
        for node in inside:
            if not outside.isdisjoint(node.users):
                yield Site(node, plan=(_below_views(node),))
            elif routing := _routing(node):
                told = any(part.args[0] in plans for part in routing)
                largest = max(routing, key=_size)
                reason = "" if told else _too_wide(largest, arg(node, 0), context)
                yield Site(node, reason, plan=routing, by_choice=not told)
            elif (source := _projected(node)) is not None:
                yield Site(node, _too_wide(node, source, context), plan=(node,), by_choice=True)
            elif _is_attention(node):
                yield Site(node, _too_short(node, context), plan=(node,), by_choice=True)

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        for kept in site.plan:
            whole = arg(kept, 0) if kept.target is operator.getitem else kept
            parts = [n for n in whole.users if n.target is operator.getitem]
            for node in (whole, *parts):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _outside(graph: fx.Graph, inside: set[fx.Node], backward: set[fx.Node]) -> set[fx.Node]:
    """Find what forward computes from its last segment for its outputs. (That a node has no tag
    says less: nodes that Inductor's own passes make inside of a segment have none.)"""
    found: set[fx.Node] = set()
    leads_inside = set(inside)
    for node in reversed(graph.nodes):
        if node in backward:
            continue
        if node in leads_inside or not leads_inside.isdisjoint(node.users):
            leads_inside.add(node)
        elif any(user.op == "output" or user in found for user in node.users):
            found.add(node)
    return found


def _below_views(node: fx.Node) -> fx.Node:
    """Return what a view looks at: the partitioner computes views again whatever it is told."""
    while node.target in VIEWS and is_checkpointed(arg(node, 0)):
        node = arg(node, 0)
    return node


def _projected(node: fx.Node) -> fx.Node | None:
    """Return x where the node is an adapter's `x A'`. (A product of a wide buffer is none.)"""
    if node.target is PROJECT:
        return arg(node, 0)
    product = as_product(node)
    if product is None or product.x.target in WIDE or not is_projection(product):
        return None
    return product.x


def _routing(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the routing of a product of tokens with experts, and the choices it is made from."""
    if node.target is not SCATTER2SCATTER or node.args[ARGUMENTS.index("grouped_in")]:
        return ()
    parts = [arg(node, ARGUMENTS.index(name)) for name in ("order", "inverse", "offsets", "tiles")]
    source: object = parts[0]
    while isinstance(source, fx.Node) and source.target is not aten.topk.default:
        if source.target is PLAN:
            parts += _exchanged(source)
        source = next(iter(source.args), None)
    if isinstance(source, fx.Node):
        parts += [part for part in source.users if part.target is operator.getitem]
    return tuple(part for part in parts if is_checkpointed(part))


def _exchanged(plan: fx.Node) -> list[fx.Node]:
    """Return what ranks that share experts tell each other before they send tokens: a plan, and the
    gates of the tokens that they receive, of which there are as many as choices."""
    parts = [user for user in plan.users if user.target is operator.getitem]
    ids = next(part for part in parts if part.args[1] == Exchange._fields.index("ids"))
    sent = [user for user in ids.users if user.target is TO_EXPERTS]
    gates = [n for n in sent if tensor(n).shape[1:] == tensor(ids).shape[1:]]
    return parts + gates


def _too_wide(node: fx.Node, source: fx.Node, context: Context) -> str:
    least = context.threshold("keep_checkpointed.min_ratio")
    ratio = _size(source) // max(1, _size(node))
    if ratio >= least:
        return ""
    return f"its input is {ratio} times as large, less than keep_checkpointed.min_ratio={least}"


def _size(node: fx.Node) -> int:
    return hint(tensor(node).numel()) * tensor(node).element_size()


def _is_attention(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return node.target is torch.ops.higher_order.flex_attention or (
        name.startswith(_ATTENTION) and "backward" not in name
    )


def _too_short(node: fx.Node, context: Context) -> str:
    least = context.threshold("keep_checkpointed.min_positions")
    count = hint(tensor(arg(node, 0)).shape[-2])
    if count >= least:
        return ""
    return (
        f"attention of {count} positions is computed again, fewer than "
        f"keep_checkpointed.min_positions={least}"
    )
