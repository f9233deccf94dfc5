"""Attention under a causal mask that the model computed: `is_causal=True`, and no mask.

In eager, transformers leaves a mask out where it is the causal one. Under torch.compile it writes
the mask out up to torch 2.13 (`masking_utils._ignore_causal_mask_sdpa`: Dynamo traces as if it
exported), and a kernel that is given a mask computes the half of attention that is masked. Keys and
values that were repeated for grouped queries are taken as they were, as in eager, where the kernels
of the device know grouped queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from inductor_q.diagnostics.context import Context
from inductor_q.passes.causal_mask import CHECKPOINT, same_size, why_not_causal
from inductor_q.passes.runner import CAPTURED, Site

ATTENTION = torch.nn.functional.scaled_dot_product_attention
HEAD_DIM = 256  # the largest of the fused kernels that know grouped queries


@dataclass(frozen=True)
class _Call:
    """What to call with: `key` and `value` as they were before they were repeated, if they were."""

    key: fx.Node
    value: fx.Node
    grouped: bool


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
                yield Site(node, plan=_plan(arguments), provider="sdpa")

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        plan: _Call = site.plan
        query = site.node.args[0] if site.node.args else site.node.kwargs["query"]
        kept = {k: v for k, v in site.node.kwargs.items() if k in ("dropout_p", "scale")}
        if len(site.node.args) > 4:
            kept["dropout_p"] = site.node.args[4]
        if plan.grouped:
            kept["enable_gqa"] = True
        site.node.args = (query, plan.key, plan.value)
        site.node.kwargs = {**kept, "is_causal": True}


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


def _plan(arguments: dict[str, Any]) -> _Call:
    key, value, query = arguments["key"], arguments["value"], _value(arguments["query"])
    one_key, one_value = _before_repeat(key), _before_repeat(value)
    widths = query.shape[-1], _value(value).shape[-1]
    fused = _knows_groups(query) and same_size(*widths) and widths[0] <= HEAD_DIM
    if one_key is None or one_value is None or not fused:
        return _Call(key, value, grouped=bool(arguments["enable_gqa"]))
    return _Call(one_key, one_value, grouped=True)


def _knows_groups(query: torch.Tensor) -> bool:
    """Whether flash attention or cuDNN can serve it: others write the scores out for groups."""
    if query.device.type != "cuda" or query.dtype.itemsize != 2:
        return False
    return torch.cuda.get_device_capability(query.device) >= (8, 0)


def _before_repeat(node: fx.Node) -> fx.Node | None:
    """`x` [B, H, S, D] of `x[:, :, None].expand(B, H, n, S, D).reshape(B, H n, S, D)`."""
    if node.target != "reshape" or not isinstance(node.args[0], fx.Node):
        return None
    expanded = node.args[0]
    if expanded.target != "expand" or not isinstance(expanded.args[0], fx.Node):
        return None
    source = expanded.args[0].args[0] if expanded.args[0].args else None
    if not isinstance(source, fx.Node):
        return None
    full = slice(None)
    if expanded.args[0].args[1:] != ((full, full, None, full, full),):
        return None
    shapes = [value.shape for value in map(_value, (source, expanded, node))]
    if [len(shape) for shape in shapes] != [4, 5, 4]:
        return None
    (b, h, s, d), repeated, result = shapes
    expected = (b, h, repeated[2], s, d), (b, repeated[2] * h, s, d)
    pairs = zip((*repeated, *result), (*expected[0], *expected[1]), strict=True)
    return source if all(same_size(*pair) for pair in pairs) else None
