"""Never save a dequantized weight for backward.

The rule knows no format: whatever is computed from frozen inputs alone, packed weights among them,
is recomputed in backward from those inputs, which live anyway. It holds for every library whose
dequantization is traced: bitsandbytes, torchao, ours. Stock partitioning saves the 16-bit
weight as soon as forward and backward share it, and tagging only part of a chain makes it save the
rest. Kept are the scales that products in eight bits give a weight's rows (`emit_eight_bits`).
Other bytes and integers that a module holds are left to torch.

In a nested compile region torch does not say which inputs are frozen: there it holds for what
`qfuse::dequantize` reads.

It refuses packed tensors that the forward pass itself writes to: backward would decode what is in
them by then.

It runs in Inductor's partitioner, after the joint passes; the partitioning itself is functorch's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import fx
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from inductor_q.capture.dynamo import input_index, packed_inputs
from inductor_q.capture.example import hint
from inductor_q.capture.packed import holds_codes
from inductor_q.context import Context
from inductor_q.passes.graph import (
    backward_nodes,
    base_descriptor,
    is_nested,
    is_tangent,
    is_tensor,
    is_view,
    tensor,
    written_inputs,
)
from inductor_q.passes.recompute import is_kept
from inductor_q.passes.runner import Site

# Constants may be part of a frozen chain.
_CONSTANTS = frozenset({torch.ops.aten.full.default, torch.ops.prims.iota.default})


WRITTEN = "the forward pass writes to the packed tensor: backward would decode other values"

NESTED = (
    "in a nested compile region torch does not tell weights from activations: what this one is "
    "decoded to is kept for backward"
)


class KeepPacked:
    name: ClassVar[str] = "keep_packed"
    stage: ClassVar[str] = "partition"

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        """Yield one site for each value that backward reads and stock partitioning may save.

        Its plan is every tensor of such chains: tagging a part only moves what is saved.
        """
        static, operands = static_inputs(graph, context), _operands(graph)
        if is_nested(graph):
            static = operands
            yield from _unknown(graph, static)
        live = static - _trainable(graph)
        packed = _weights(live, context) | (operands & live)
        everything = _packed_chains(graph, live, packed)
        frozen = computed_from_inputs(graph, live - written_inputs(graph))
        decoded = {node for node in frozen if not is_kept(node)}
        chain = {node: source for node, source in everything.items() if node in decoded}
        weights = computed_from_inputs(graph, static)
        backward = backward_nodes(graph)
        for node, source in everything.items():
            readers = _readers(node, weights, everything)
            if is_kept(node) or is_view(node) or not any(r in backward for r in readers):
                continue
            if node not in chain:
                yield Site(node, WRITTEN, source)
                continue
            value = tensor(node)
            size = hint(value.numel()) * value.element_size()
            yield Site(node, weight=source, plan=chain, bytes_saved=size)

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        for node in site.plan:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _operands(graph: fx.Graph) -> set[fx.Node]:
    """Find the inputs of dequantizations. In a nested compile region, where torch names no static
    input, they alone are known to be packed weights."""
    ops = torch.ops.qfuse
    decodes = [op.default for op in (ops.dequantize, ops.row_amax, ops.row_scale, ops.requantize)]
    calls = [call for op in decodes for call in graph.find_nodes(op="call_function", target=op)]
    return {a for call in calls for a in call.all_input_nodes if a.op == "placeholder"}


def _unknown(graph: fx.Graph, operands: set[fx.Node]) -> Iterator[Site]:
    """Refuse the matrices of a nested region that may be packed weights of another library."""
    for node in graph.find_nodes(op="placeholder"):
        is_matrix = _holds_codes(node) and tensor(node).dim() > 1
        is_matrix = is_matrix and tensor(node).element_size() == 1
        if is_matrix and node not in operands and node.users:
            yield Site(next(iter(node.users)), NESTED, node)


def static_inputs(graph: fx.Graph, context: Context) -> set[fx.Node]:
    """Find the inputs that live across steps.

    Torch counts static inputs as Dynamo's, not as the desugared ones (a tensor subclass becomes
    several), so both sides are compared by descriptor.
    """
    known = context.static_inputs
    inputs = graph.find_nodes(op="placeholder")
    return {n for n in inputs if not is_tangent(n) and input_index(n) in known}


def _trainable(graph: fx.Graph) -> set[fx.Node]:
    """Find the inputs that take a gradient."""
    output = next(iter(graph.find_nodes(op="output")))
    of = {
        base_descriptor(desc.grad_of)
        for value, desc in zip(
            tree_leaves(output.args), tree_leaves(output.meta.get("desc", [])), strict=False
        )
        if value is not None and getattr(desc, "grad_of", None) is not None
    }
    return {
        n for n in graph.find_nodes(op="placeholder") if base_descriptor(n.meta.get("desc")) in of
    }


def computed_from_inputs(graph: fx.Graph, inputs: set[fx.Node]) -> set[fx.Node]:
    """Find `inputs` and every tensor that is computed from them and constants alone."""
    known = set(inputs)
    for node in graph.nodes:
        if (
            node.op == "get_attr"
            or (node.op == "call_function" and node.target in _CONSTANTS)
            or (
                node.op == "call_function"
                and is_tensor(node)
                and node.all_input_nodes
                and all(a in known for a in node.all_input_nodes)
                and torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ())
            )
        ):
            known.add(node)
    return known


def _weights(inputs: set[fx.Node], context: Context) -> set[fx.Node]:
    """Find the packed weights among inputs that live across steps. Not all that holds codes is one:
    a program may change positions, counters or masks between forward and backward."""
    codes = [node for node in inputs if _holds_codes(node)]
    parts = {node for node in codes if hasattr(node.meta.get("desc"), "base")}  # of a subclass
    places = {node: place for node in codes if (place := input_index(node)) is not None}
    known = packed_inputs(context.sources, {i: tensor(node) for node, i in places.items()})
    return parts | {node for node, place in places.items() if place in known}


def _packed_chains(
    graph: fx.Graph, frozen: set[fx.Node], packed: set[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Map tensors that are computed from frozen inputs alone to the packed input they come from, or
    that they help to decode: scales that are repeated for each row are as large as the weight."""
    known = computed_from_inputs(graph, frozen)
    source = {node: node for node in packed if _holds_codes(node)}
    for node in graph.nodes:
        weights = [source[a] for a in node.all_input_nodes if a in source]
        if node in known and weights:
            source[node] = weights[0]
    for node in [n for n in reversed(graph.nodes) if n in known and n.all_input_nodes]:
        weights = [source[user] for user in node.users if user in source]
        if weights:
            source.setdefault(node, weights[0])
    return {node: weight for node, weight in source.items() if node.op == "call_function"}


def _holds_codes(node: fx.Node) -> bool:
    return is_tensor(node) and holds_codes(tensor(node))


def _readers(
    node: fx.Node, weights: set[fx.Node], chain: Mapping[fx.Node, fx.Node]
) -> set[fx.Node]:
    """Find the users of a weight that read activations, through what is computed from weights alone
    (a layout change, the concatenation with an adapter). A further step of decoding is no reader:
    its result is the value that would be saved."""
    found: set[fx.Node] = set()
    for user in node.users:
        if user in weights:
            if user not in chain or is_view(user):
                found |= _readers(user, weights, chain)
        else:
            found.add(user)
    return found
