"""Attention under a mask that the model computed from nothing, from padding, or from documents.

In eager, transformers leaves a mask out where it is the causal one. Under torch.compile it writes
the mask out up to torch 2.13 (`masking_utils._ignore_causal_mask_sdpa`: Dynamo traces as if it
exported), and a kernel that is given a mask computes the half of attention that is masked. Keys and
values that it repeated on that account for groups of queries are taken as they were, as in eager.

A mask that also hides padding (every collator of text passes one) becomes none: queries, keys and
values are reordered so that the valid positions come first, which `is_causal` then treats as the
mask did. Rows of valid positions are what they were. Attention gives zero for rows of padding, as
eager does for those before the first valid position; those after it see valid keys in eager.
Nothing valid sees them, so a loss that ignores them has the same gradients. Under strict numerics
the mask is kept.

A mask that keeps documents of packed `position_ids` apart becomes FlexAttention, which computes the
blocks of scores that a document has. What both need is made once, before the first layer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import fx

from inductor_q.capture.example import hint
from inductor_q.context import Context
from inductor_q.passes.causal_mask import CHECKPOINT, Kind, Meaning, Unproven, read, same_size
from inductor_q.passes.grouped_keys import before_repeat
from inductor_q.passes.runner import CAPTURED, Site

ATTENTION = torch.nn.functional.scaled_dot_product_attention
QFUSE = torch.ops.qfuse


class CausalAttention:
    name: ClassVar[str] = "causal_attention"
    stage: ClassVar[str] = CAPTURED

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        module = graph.owning_module
        outside = {} if module is None else _checkpointed(module)
        found: dict[fx.Node, Meaning | Unproven] = {}
        graphs = [graph, *dict.fromkeys(n.graph for n in outside)]
        for node in (n for g in graphs for n in g.nodes if n.target is ATTENTION):
            arguments = _arguments(node)
            mask = arguments["attn_mask"]
            if not isinstance(mask, fx.Node) or arguments["is_causal"]:
                continue
            root = outside.get(mask, mask)
            if root not in found:
                found[root] = read(root, outside, graphs)
            meaning = found[root]
            if isinstance(meaning, Unproven):
                yield Site(node, rejected=meaning.reason, by_choice=True)
            elif reason := _of_other_sizes(arguments, root) or _kept(meaning, node, root, context):
                yield Site(node, rejected=reason, by_choice=True)
            elif meaning.kind is Kind.DOCUMENTS:
                yield _documents(node, arguments, graphs, root, meaning)
            else:
                yield _causal(node, arguments, graphs, root, meaning)

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        plan: _Plan = site.plan
        arguments = dict(plan.arguments)
        query, key, value = (arguments.pop(name) for name in ("query", "key", "value"))
        node, kind = site.node, plan.meaning.kind
        if kind is Kind.CAUSAL:
            node.args, node.kwargs = (query, key, value), arguments
            return
        made = _given_to(node.graph, graph, _shared(graph, plan))
        with node.graph.inserting_before(node):
            if kind is Kind.DOCUMENTS:
                given = (query, key, value, made, arguments["scale"])
                new = node.graph.call_function(QFUSE.document_attention.default, given)
            else:
                order, inverse, _ = made
                moved = tuple(_move(x, order, inverse, node) for x in (query, key, value))
                attended = node.graph.call_function(ATTENTION, moved, arguments)
                attended.meta = dict(node.meta)
                new = node.graph.call_function(QFUSE.restore.default, (attended, *made))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        node.graph.erase_node(node)


@dataclass(frozen=True)
class _Plan:
    """How a call of attention is made without its mask, whose node in Dynamo's graph is `mask`."""

    meaning: Meaning
    mask: fx.Node
    arguments: dict[str, Any]


def _kept(meaning: Meaning, node: fx.Node, mask: fx.Node, context: Context) -> str:
    """Why a mask stays that is more than causal; empty if it goes."""
    if meaning.kind is Kind.CAUSAL:
        return ""
    if meaning.kind is Kind.VALID_KEYS and context.numerics == "strict":
        return "strict numerics keep what rows of padding see"
    least = context.threshold("causal_attention.min_positions")
    count = hint(mask.meta["example_value"].shape[-1])
    if count >= least:
        return ""
    return f"{count} positions, fewer than causal_attention.min_positions={least}: the mask is kept"


def _shared(graph: fx.Graph, plan: _Plan) -> list[fx.Node]:
    """Make once, behind the mask in Dynamo's graph, the tensors that all layers under it share."""
    source = plan.meaning.source
    assert source is not None
    make = getattr(QFUSE, _MADE[plan.meaning.kind]).default
    for user in source.users:
        if user.target is make:
            return sorted(user.users, key=lambda item: cast("int", item.args[1]))
    value = plan.mask.meta["example_value"]
    with graph.inserting_before(plan.mask.next):
        args: tuple[Any, ...] = (source,)
        if plan.meaning.kind is Kind.DOCUMENTS:
            batch = value.shape[0]
            if not isinstance(batch, int):
                batch = graph.call_method("size", (plan.mask, 0))
                batch.meta["example_value"] = value.shape[0]
            args = (source, batch)
        call = graph.call_function(make, args)
        with value.fake_mode:  # Dynamo's own: the backend's is another by now
            made = make(*fx.node.map_arg(args, lambda given: given.meta["example_value"]))
        items = []
        for i, item in enumerate(made):
            items.append(graph.call_function(operator.getitem, (call, i)))
            items[-1].meta["example_value"] = item
    return items


_MADE = {
    Kind.VALID_KEYS: "valid_first",
    Kind.DOCUMENTS: "document_tables",
}


def _given_to(body: fx.Graph, graph: fx.Graph, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """`nodes` of Dynamo's graph as `body` sees them: new operands, where it is of a checkpoint."""
    if body is graph:
        return list(nodes)
    module = graph.owning_module
    assert module is not None, "a graph with checkpoints has a module"
    calls = [call for call, called in _checkpoints(module) if called.graph is body]
    inner = body.find_nodes(op="placeholder")
    places = []
    for call in calls:
        given = _given_to(call.graph, graph, nodes)
        if not all(node in call.args[1:] for node in given):
            call.args = (*call.args, *given)
        places = [call.args.index(node) - 1 for node in given]
    for place, node in zip(places, nodes, strict=True):
        if place == len(inner):
            with body.inserting_after(inner[-1]):
                inner.append(body.placeholder(f"{node.name}_given"))
            inner[-1].meta = dict(node.meta)
    return [inner[place] for place in places]


def _move(x: fx.Node, order: fx.Node, inverse: fx.Node, before: fx.Node) -> fx.Node:
    node = before.graph.call_function(QFUSE.reorder.default, (x, order, inverse))
    node.meta = {**before.meta, "example_value": x.meta["example_value"]}
    return node


_PARAMETERS: dict[str, Any] = {
    "query": None,
    "key": None,
    "value": None,
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}


def _causal(
    node: fx.Node,
    arguments: dict[str, Any],
    graphs: list[fx.Graph],
    mask: fx.Node,
    meaning: Meaning,
) -> Site:
    without = {**arguments, "attn_mask": None, "is_causal": True}
    padded = ", valid first" if meaning.kind is Kind.VALID_KEYS else ""
    found = before_repeat(node, arguments, graphs)
    if isinstance(found, str):
        provider = f"sdpa{padded}, repeated keys: {found}" if found else f"sdpa{padded}"
        return Site(node, plan=_Plan(meaning, mask, without), provider=provider)
    key, value = found
    without |= {"key": key, "value": value, "enable_gqa": True}
    return Site(node, plan=_Plan(meaning, mask, without), provider=f"sdpa{padded}, grouped keys")


def _documents(
    node: fx.Node,
    arguments: dict[str, Any],
    graphs: list[fx.Graph],
    mask: fx.Node,
    meaning: Meaning,
) -> Site:
    if arguments["dropout_p"] != 0:
        return Site(node, rejected="FlexAttention drops no scores out", by_choice=True)
    found = before_repeat(node, arguments, graphs)
    if not isinstance(found, str):
        arguments |= dict(zip(("key", "value"), found, strict=True))
    return Site(node, plan=_Plan(meaning, mask, arguments), provider="FlexAttention of documents")


def _arguments(node: fx.Node) -> dict[str, Any]:
    return {**_PARAMETERS, **dict(zip(_PARAMETERS, node.args, strict=False)), **node.kwargs}


def _checkpoints(module: torch.nn.Module) -> Iterator[tuple[fx.Node, fx.GraphModule]]:
    """The calls of activation checkpoints, in whichever graph of `module`, and their bodies."""
    for owner in module.modules():
        if not isinstance(owner, fx.GraphModule):
            continue
        for call in owner.graph.nodes:
            if getattr(call.target, "__name__", "") == CHECKPOINT:
                body = getattr(owner, str(call.args[0].target), None)
                if isinstance(body, fx.GraphModule):
                    yield call, body


def _checkpointed(module: torch.nn.Module) -> dict[fx.Node, fx.Node]:
    """Placeholders of the bodies of activation checkpoints -> what each is given, outermost; itself
    where a body is called with one thing and another."""
    found: dict[fx.Node, fx.Node] = {}
    for call, body in _checkpoints(module):
        inner = body.graph.find_nodes(op="placeholder")
        for placeholder, given in zip(inner, call.args[1:], strict=False):
            if isinstance(given, fx.Node):
                root = found.get(given, given)
                same = found.setdefault(placeholder, root) is root
                found[placeholder] = root if same else placeholder
    return found


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def _of_other_sizes(arguments: dict[str, Any], mask: fx.Node) -> str:
    shape = _value(mask).shape
    for name in ("query", "key"):
        value = _value(arguments[name])
        if not isinstance(value, torch.Tensor) or not same_size(value.shape[-2], shape[-1]):
            return f"the mask has not the {name}'s length"
    return ""
