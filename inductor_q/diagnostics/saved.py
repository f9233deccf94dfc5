"""What a training graph keeps for its backward, by the op that computed it."""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from inductor_q.diagnostics.explanation import SavedTensors
from inductor_q.passes.graph import hint


def saved_tensors(forward: fx.Graph, num_fwd_outputs: int) -> tuple[SavedTensors, ...]:
    """What a partitioned forward graph returns for the backward, after its own outputs.

    Inputs (weights, the batch) live anyway and views share their base's memory, so neither is
    counted; an output that is also saved (the logits of a loss) is. A size that is a symbol counts
    with its example value.
    """
    output = next(iter(forward.find_nodes(op="output")))
    values = tree_leaves(output.args[0])
    kept = {_base(v) for v in values[num_fwd_outputs:] if isinstance(v, fx.Node)}
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for node in kept:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor):
            continue
        name = _op(node)
        count[name] += 1
        size[name] += hint(value.numel()) * value.element_size()
    return tuple(SavedTensors(op, count[op], n) for op, n in size.most_common())


def _base(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows."""
    while node.op == "call_function" and getattr(node.target, "is_view", False):
        source = node.args[0]
        if not isinstance(source, fx.Node):
            break
        node = source
    return node


def _op(node: fx.Node) -> str:
    source = node.args[0] if node.args else None
    if getattr(node.target, "__name__", "") == "getitem" and isinstance(source, fx.Node):
        return _op(source)
    return str(node.target).removesuffix(".default")
