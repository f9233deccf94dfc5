"""Attention of one query reads grouped keys as they lie: heads that share keys are queries of one.

In decoding each head has one query, and the heads of a group have the same keys. As queries of one
head they need no copy of a cache for each of them, and every backend of sdpa takes them under any
mask that is one row for all heads. It is what transformers does in eager, and what it leaves out
under torch.compile: there it repeats keys and values, a whole static cache in each layer.

Scores, softmax and sums are those of the program, so it is the same under strict numerics; kernels
may add in another order.

Without gradients `qfuse.attention_rows` computes it where a preset says so: sdpa's kernels for a
mask give one query of a head to one program, which reads all keys in a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from inductor_q.capture.example import hint
from inductor_q.context import Context
from inductor_q.ops.registry import define_ops
from inductor_q.passes.causal_attention import ATTENTION, arguments_of
from inductor_q.passes.dynamo_graph import is_transformed, same_size
from inductor_q.passes.grouped_keys import unrepeated
from inductor_q.passes.runner import CAPTURED, Site

define_ops()  # the vocabulary

ATTENTION_ROWS = torch.ops.qfuse.attention_rows.default


@dataclass(frozen=True)
class _Plan:
    """How attention is called, the number of heads of its queries and of its keys, and whether
    `qfuse.attention_rows` computes it."""

    arguments: dict[str, Any]
    heads: int | torch.SymInt
    groups: int | torch.SymInt
    by_rows: bool


class GroupQueries:
    name: ClassVar[str] = "group_queries"
    stage: ClassVar[str] = CAPTURED

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        for node in graph.find_nodes(op="call_function", target=ATTENTION):
            arguments = arguments_of(node)
            query = _shape(arguments["query"])
            if len(query) != 4 or not _is(query[2], 1):
                continue
            found = _grouped(node, arguments)
            if found == "":
                continue
            if any(is_transformed(n) for n in (node, *node.all_input_nodes)):
                found = "attention is inside of a transform of torch.func"
            reason = found if isinstance(found, str) else _refused(arguments, found)
            if reason or isinstance(found, str):
                yield Site(node, rejected=reason, by_choice=True)
                continue
            key, value = found
            grouped = {"key": key, "value": value, "enable_gqa": False}
            arguments |= grouped
            by_rows = _by_rows(node, arguments, context)
            plan = _Plan(arguments, query[1], _shape(key)[1], by_rows)
            how = "qfuse.attention_rows" if by_rows else "sdpa"
            yield Site(node, plan=plan, provider=f"{how}, grouped queries")

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        plan: _Plan = site.plan
        arguments, node = dict(plan.arguments), site.node
        query, key, value = (arguments.pop(name) for name in ("query", "key", "value"))
        groups = int(
            plan.groups
        )  # where heads are symbols this is a guard: a model's do not change
        sizes = (groups, int(plan.heads) // groups)
        with graph.inserting_before(node):
            grouped = _view(_view(query, "unflatten", 1, sizes), "squeeze", 3)
            if plan.by_rows:
                scale = _scale(grouped, arguments["scale"])
                given = (grouped, key, value, arguments["attn_mask"], scale)
                new = graph.call_function(ATTENTION_ROWS, given)
            else:
                new = graph.call_function(ATTENTION, (grouped, key, value), arguments)
            result = node.meta["example_value"]
            new.meta = {**node.meta, "example_value": result.unflatten(1, sizes).squeeze(3)}
            apart = _view(_view(new, "flatten", 1, 2), "unsqueeze", 2)
        apart.meta = dict(node.meta)
        node.replace_all_uses_with(apart)
        graph.erase_node(node)


def _grouped(node: fx.Node, arguments: dict[str, Any]) -> tuple[fx.Node, fx.Node] | str:
    """Return keys and values of fewer heads than queries; else why not, empty where there are
    none."""
    key, value = arguments["key"], arguments["value"]
    if not arguments["enable_gqa"]:
        return unrepeated(node, arguments)
    heads = [_shape(x)[1] for x in (arguments["query"], key, value)]
    if same_size(heads[0], heads[1]) and same_size(heads[1], heads[2]):
        return ""
    return (key, value) if same_size(heads[1], heads[2]) else "keys and values differ in heads"


def _refused(arguments: dict[str, Any], found: tuple[fx.Node, fx.Node]) -> str:
    """Return why the heads of a group are not taken as queries of one; empty if they are."""
    query, key = _shape(arguments["query"]), _shape(found[0])
    mask = arguments["attn_mask"]
    if arguments["is_causal"]:
        return "is_causal of one query, which sees the first key alone"
    if arguments["dropout_p"] != 0:
        return f"attention drops scores out (dropout_p={arguments['dropout_p']})"
    if hint(query[1]) % hint(key[1]):
        return f"{hint(query[1])} heads of queries are not some times {hint(key[1])} of keys"
    if not same_size(query[0], key[0]):
        return "queries and keys differ in batch"
    if mask is not None and not all(_is(size, 1) for size in _shape(mask)[-3:-1]):
        return "the mask is not one row for all heads"
    return ""


def _by_rows(node: fx.Node, arguments: dict[str, Any], context: Context) -> bool:
    """Whether `qfuse.attention_rows` computes attention, which takes no gradient and one mask."""
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    mask = _shape(arguments["attn_mask"])
    values = [x.meta["example_value"] for x in (node, query, key, value)]
    return (
        len(mask) == 4
        and arguments["attn_mask"].meta["example_value"].dtype is torch.bool
        and same_size(mask[-1], _shape(key)[2])
        and (_is(mask[0], 1) or same_size(mask[0], _shape(query)[0]))
        and same_size(_shape(key)[-1], _shape(value)[-1])
        and not any(x.requires_grad for x in values)
        and len({x.dtype for x in values}) == 1  # autocast casts inside of the call
        and hint(mask[-1]) >= context.threshold("attention_rows.min_keys")
    )


def _scale(query: fx.Node, scale: float | None) -> float:
    return float(_shape(query)[-1]) ** -0.5 if scale is None else float(scale)


def _is(size: Any, number: int) -> bool:
    """Whether a size is this number; adds no guard."""
    return isinstance(size, int) and size == number


def _shape(node: Any) -> tuple[Any, ...]:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return tuple(getattr(value, "shape", ()))


def _view(x: fx.Node, name: str, *args: Any) -> fx.Node:
    """Call a method that returns a view, or a tensor of the same numbers."""
    node = x.graph.call_method(name, (x, *args))
    value: torch.Tensor = x.meta["example_value"]
    node.meta = {**x.meta, "example_value": getattr(value, name)(*args)}
    return node
