"""Attention under a causal mask that the model computed: `is_causal=True`, and no mask.

In eager, transformers leaves a mask out where it is the causal one. Under torch.compile it writes
the mask out up to torch 2.13 (`masking_utils._ignore_causal_mask_sdpa`: Dynamo traces as if it
exported), and a kernel that is given a mask computes the half of attention that is masked. Keys and
values that it repeated on that account for groups of queries are taken as they were, as in eager.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import fx

from inductor_q.context import Context
from inductor_q.passes.causal_mask import CHECKPOINT, same_size, why_not_causal
from inductor_q.passes.grouped_keys import before_repeat
from inductor_q.passes.runner import CAPTURED, Site

ATTENTION = torch.nn.functional.scaled_dot_product_attention


class CausalAttention:
    name: ClassVar[str] = "causal_attention"
    stage: ClassVar[str] = CAPTURED

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        module = graph.owning_module
        outside = {} if module is None else _checkpointed(module)
        reasons: dict[fx.Node, str] = {}
        graphs = [graph, *dict.fromkeys(n.graph for n in outside)]
        for node in (n for g in graphs for n in g.nodes if n.target is ATTENTION):
            arguments = _arguments(node)
            mask = arguments["attn_mask"]
            if not isinstance(mask, fx.Node) or arguments["is_causal"]:
                continue
            root = outside.get(mask, mask)
            if root not in reasons:
                reasons[root] = why_not_causal(root, outside, graphs)
            reason = reasons[root] or _of_other_sizes(arguments, root)
            if reason:
                yield Site(node, rejected=reason, by_choice=True)
            else:
                yield _causal(node, arguments, graphs)

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        arguments = dict(site.plan)
        site.node.args = tuple(arguments.pop(name) for name in ("query", "key", "value"))
        site.node.kwargs = arguments


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


def _causal(node: fx.Node, arguments: dict[str, Any], graphs: list[fx.Graph]) -> Site:
    plan = {**arguments, "attn_mask": None, "is_causal": True}
    found = before_repeat(node, arguments, graphs)
    if isinstance(found, str):
        provider = f"sdpa, repeated keys: {found}" if found else "sdpa"
        return Site(node, plan=plan, provider=provider)
    key, value = found
    plan |= {"key": key, "value": value, "enable_gqa": True}
    return Site(node, plan=plan, provider="sdpa, grouped keys")


def _arguments(node: fx.Node) -> dict[str, Any]:
    return {**_PARAMETERS, **dict(zip(_PARAMETERS, node.args, strict=False)), **node.kwargs}


def _checkpointed(module: torch.nn.Module) -> dict[fx.Node, fx.Node]:
    """Placeholders of the bodies of activation checkpoints -> what each is given, outermost; itself
    where a body is called with one thing and another."""
    found: dict[fx.Node, fx.Node] = {}
    for owner in module.modules():
        if not isinstance(owner, fx.GraphModule):
            continue
        for call in owner.graph.nodes:
            if getattr(call.target, "__name__", "") != CHECKPOINT:
                continue
            body = getattr(owner, str(call.args[0].target), None)
            if isinstance(body, fx.GraphModule):
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
