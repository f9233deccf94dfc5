"""Count what a training graph keeps for its backward, by the op that computed it."""

from __future__ import annotations

import operator
from collections import Counter

import torch
from torch import fx
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch.utils._pytree import tree_leaves

from inductor_q.capture.example import hint
from inductor_q.diagnostics.explanation import SavedTensors


def saved_tensors(forward: fx.Graph, num_fwd_outputs: int) -> tuple[SavedTensors, ...]:
    """Count what a partitioned forward graph returns for the backward, after its own outputs.

    Inputs (weights, the batch) live anyway and views share their base's memory, so neither is
    counted; an output that is also saved (the logits of a loss) is. A size that is a symbol counts
    with its example value.
    """
    output = next(iter(forward.find_nodes(op="output")))
    values = tree_leaves(output.args[0])
    kept = {_base(v) for v in values[num_fwd_outputs:] if isinstance(v, fx.Node)}
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for node, _ in kept:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor):
            continue
        name = _op(node)
        count[name] += 1
        size[name] += hint(value.numel()) * value.element_size()
    return tuple(SavedTensors(op, count[op], n) for op, n in size.most_common())


_Calls = tuple[fx.Node, ...]


def _base(node: fx.Node, calls: _Calls = ()) -> tuple[fx.Node, _Calls]:
    """Return the node whose memory a view or a result of a nested compile region shows.

    With it come the calls of regions that lead to its graph.
    """
    source = node.args[0] if node.args else None
    if node.op == "placeholder" and calls:
        given = calls[-1].args[2 + node.graph.find_nodes(op="placeholder").index(node)]
        return _base(given, calls[:-1]) if isinstance(given, fx.Node) else (node, calls)
    if node.op != "call_function" or not isinstance(source, fx.Node):
        return node, calls
    if getattr(node.target, "is_view", False):
        return _base(source, calls)
    if node.target is operator.getitem and source.target is invoke_subgraph:
        body = getattr(source.graph.owning_module, str(source.args[0].target))  # type: ignore[union-attr]
        returned = body.graph.output_node().args[0][node.args[1]]
        return _base(returned, (*calls, source))
    return node, calls


def _op(node: fx.Node) -> str:
    source = node.args[0] if node.args else None
    if getattr(node.target, "__name__", "") == "getitem" and isinstance(source, fx.Node):
        return _op(source)
    return str(node.target).removesuffix(".default")
