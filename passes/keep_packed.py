"""Never save a dequantized weight for backward.

Not per format but in general: whatever is computed only from frozen inputs (packed weights, scales,
code tables) is recomputed in backward from those inputs, which live anyway. It holds for every
library whose dequantization is traced: bitsandbytes, torchao, ours. Stock partitioning saves the
16-bit weight as soon as forward and backward share it.

Runs as Inductor's partitioner, after the joint passes; the partitioning itself is functorch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import fx
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from inductor_q.diagnostics.context import Context, input_index
from inductor_q.diagnostics.report import PassRecord, SiteRecord
from inductor_q.passes.graph import is_tangent, is_tensor, tensor
from inductor_q.passes.products import DEQUANTIZE, packed_weight

#: Constants count as frozen: a chain over frozen inputs may use them.
_CONSTANTS = frozenset({torch.ops.aten.full.default, torch.ops.prims.iota.default})


class KeepPacked:
    name: ClassVar[str] = "keep_packed"
    stage: ClassVar[str] = "partition"


def tag_frozen(
    gm: fx.GraphModule, static_indices: Sequence[int], context: Context
) -> tuple[PassRecord, list[SiteRecord]]:
    """Tag everything computed from frozen inputs alone as MUST_RECOMPUTE; say what that saves."""
    graph = gm.graph
    frozen = _frozen_inputs(graph, set(static_indices))
    used_by_backward = _inputs_of_backward(graph)
    records = []
    for node in graph.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and node.target in _CONSTANTS):
            frozen.add(node)
            continue
        if node.op != "call_function" or not is_tensor(node) or not node.all_input_nodes:
            continue
        if not all(arg in frozen for arg in node.all_input_nodes):
            continue
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            continue
        frozen.add(node)
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        if node.target is DEQUANTIZE and node in used_by_backward:
            records.append(_record(node, context))
    return PassRecord(KeepPacked.name, len(records), 0.0), records


def _frozen_inputs(graph: fx.Graph, static: set[int]) -> set[fx.Node]:
    """Inputs that live across steps and take no gradient.

    `static` counts Dynamo's inputs, not the desugared ones (tensor subclasses become several), so
    both sides are compared by descriptor.
    """
    output = next(iter(graph.find_nodes(op="output")))
    trainable = set()
    for value, desc in zip(
        tree_leaves(output.args), tree_leaves(output.meta.get("desc", [])), strict=False
    ):
        of = getattr(desc, "grad_of", None)
        if of is not None and value is not None:
            trainable.add(_base(of))
    return {
        node
        for node in graph.find_nodes(op="placeholder")
        if not is_tangent(node)
        and input_index(node) in static
        and _base(node.meta.get("desc")) not in trainable
    }


def _base(desc: Any) -> Any:
    while hasattr(desc, "base"):
        desc = desc.base
    return desc


def _inputs_of_backward(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that something downstream of a tangent reads, directly or through frozen nodes."""
    from inductor_q.passes.graph import backward_nodes

    backward = backward_nodes(graph)
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in backward or node in found:
            found.update(a for a in node.all_input_nodes if a not in backward)
    return found


def _record(node: fx.Node, context: Context) -> SiteRecord:
    weight = packed_weight(node)
    value = tensor(node)
    return SiteRecord(
        pass_name=KeepPacked.name,
        target=str(node.target),
        module=context.module_path(weight),
        shape=tuple(int(s) for s in value.shape),
        bytes_saved=value.numel() * value.element_size(),
    )
