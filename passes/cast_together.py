"""Cast the parameters of adapters in a few launches, and their gradients, too.

Under autocast adapters are float32, and each is cast to 16 bits for its products; their gradients
are cast back. A product's operand has to lie in memory, so Inductor launches a kernel for each
cast. The kernels are tiny, and to launch one takes the host longer than it takes the GPU. Here
casts near each other become the results of one op, which Inductor writes as one kernel. The values
are what they were.

The pass takes two kinds of values. One is read by products, and is cast, scaled and laid side by
side from float32 matrices of fixed sizes alone that are inputs of the graph, as parameters are. The
other are casts of gradients that are results of the graph. Where only a part of a wide weight is
made of a cast, it stays: the kernel that makes the weight computes it there. What one launch makes
is in memory from its first reader on, so `cast_together.bytes` says how much that is at most.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import fx
from torch._inductor.codegen.common import BackendFeature, has_backend_feature

from inductor_q.capture.example import hint
from inductor_q.context import Context
from inductor_q.passes.extend_k import EXTEND
from inductor_q.passes.graph import (
    ADDMM,
    CAST,
    CAT,
    HALVES,
    MM,
    MUL,
    PAD,
    PERMUTE,
    SLICE,
    VIEWS,
    arg,
    emit,
    is_tensor,
    readers,
    tensor,
)
from inductor_q.passes.runner import LOWERED, Site

aten = torch.ops.aten
TOGETHER = torch.ops.qfuse.materialize_all.default
_PRODUCTS = frozenset({MM, ADDMM, aten.bmm.default, aten.baddbmm.default})
_SHOWN = VIEWS | {PERMUTE}
_PLAIN = "this device's code has no kernels of several tensors"
_ALONE = "no other cast is near"


@dataclass(frozen=True)
class _Group:
    """Values that one launch makes. Those of parameters are made in front of `place`, where the
    first of them is read; gradients, which have no place, as soon as all are there."""

    values: Sequence[fx.Node]
    place: fx.Node | None


class CastTogether:
    name: ClassVar[str] = "cast_together"
    stage: ClassVar[str] = LOWERED

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        most = context.threshold("cast_together.bytes")
        places = dict(_operands(graph))
        parameters = sorted(places, key=places.__getitem__)
        for nodes in (parameters, list(_gradients(graph))):
            for values in _windows(nodes, most):
                group, reason = _Group(values, places.get(values[0])), _refused(values, most)
                for i, node in enumerate(values):
                    plan = None if i else group
                    yield Site(node, reason, plan=plan, by_choice=True, provider="inductor")

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        group: _Group | None = site.plan
        if group is None:
            return
        if group.place is None:
            with graph.inserting_before(group.values[-1].next):
                made = _emit(graph, group.values)
            for value, item in zip(group.values, made, strict=True):
                value.replace_all_uses_with(item, lambda user: user.target is not TOGETHER)
            return
        with graph.inserting_before(group.place):
            padding = {value: _padding(value) for value in group.values}
            copies = [_padded(graph, _copied(graph, v), padding[v]) for v in group.values]
            for value, whole in zip(group.values, _emit(graph, copies), strict=True):
                item = _take(graph, value, whole, padding[value])
                for user in _in_memory(value):
                    user.replace_input_with(value, item)


def _operands(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Find what is made of parameters of adapters, with the first product that reads it."""
    made: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_cast_parameter(node) or _is_made_of(node, made):
            made.add(node)
            final = [end for user in _in_memory(node) for end in _final(user)]
            products = [end for end in final if end.op != "output"]
            if products:
                yield node, min(products)


def _in_memory(value: fx.Node) -> list[fx.Node]:
    """Find what reads a value from memory: products, the output, and views of it for these alone.

    Others, such as a wide weight, go on to compute it themselves: then what they scale is rounded
    to 16 bits as often as it was.
    """
    return [
        user
        for user in value.users
        if all(end.op == "output" or _is_product(end) for end in _final(user))
    ]


def _final(user: fx.Node) -> list[fx.Node]:
    return list(readers(user, _SHOWN)) if user.target in _SHOWN else [user]


def _is_cast_parameter(node: fx.Node) -> bool:
    if node.target is not CAST or not is_tensor(node) or tensor(node).dtype not in HALVES:
        return False
    source = arg(node, 0)
    is_input = source.op == "placeholder" and tensor(source).dtype is torch.float32
    return is_input and _is_matrix(source) and not _is_written(source)


def _is_matrix(node: fx.Node) -> bool:
    shape = tensor(node).shape
    return len(shape) == 2 and all(isinstance(size, int) for size in shape)


def _is_written(source: fx.Node) -> bool:
    """Whether the graph writes to one of its inputs, so that what reads it has to stay."""
    schemas = (getattr(user.target, "_schema", None) for user in source.users)
    return any(schema is not None and schema.is_mutable for schema in schemas)


def _is_made_of(node: fx.Node, made: set[fx.Node]) -> bool:
    """Whether an operator scales such a value by a number, or lays some side by side."""
    inputs = node.all_input_nodes
    known = node.target is CAT or (node.target is MUL and len(inputs) == 1)
    return known and bool(inputs) and made.issuperset(inputs)


def _is_product(node: fx.Node) -> bool:
    """Whether a node reads its operands from memory: a product, or an op of this package."""
    ours = getattr(node.target, "namespace", "") == "qfuse"
    return node.target in _PRODUCTS or (ours and node.target is not TOGETHER)


def _gradients(graph: fx.Graph) -> Iterator[fx.Node]:
    """Find casts to float32 of what a product returns, which only the graph's output reads."""
    for node in graph.find_nodes(op="call_function", target=CAST):
        source = arg(node, 0)
        widened = tensor(node).dtype is torch.float32 and tensor(source).dtype in HALVES
        if not widened or not _is_matrix(node):
            continue
        while source.target in _SHOWN | {SLICE, MUL} and len(source.all_input_nodes) == 1:
            source = arg(source, 0)
        if source.target is operator.getitem:
            source = arg(source, 0)
        if _is_product(source) and all(user.op == "output" for user in readers(node, _SHOWN)):
            yield node


def _windows(nodes: Sequence[fx.Node], most: int) -> Iterator[list[fx.Node]]:
    """Divide values in the order of the graph into groups of so many bytes at most; one that is
    larger is a group for itself."""
    values, held = list[fx.Node](), 0
    for node in nodes:
        held += _size(node)
        if values and held > most:
            yield values
            values, held = [], _size(node)
        values.append(node)
    if values:
        yield values


def _refused(values: Sequence[fx.Node], most: int) -> str:
    if not has_backend_feature(tensor(values[0]).device, BackendFeature.FOREACH):
        return _PLAIN
    if _size(values[0]) > most:
        return f"{_size(values[0])} bytes, more than cast_together.bytes={most} of the preset"
    return "" if len(values) > 1 else _ALONE


def _size(node: fx.Node) -> int:
    return hint(tensor(node).numel()) * tensor(node).element_size()


def _emit(graph: fx.Graph, values: Sequence[fx.Node]) -> list[fx.Node]:
    together = emit(graph, TOGETHER, (list(values),), values[0])
    return [emit(graph, operator.getitem, (together, i), v) for i, v in enumerate(values)]


def _copied(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """Copy a value with all that it is computed from."""
    if value.op == "placeholder":
        return value
    return graph.node_copy(value, lambda source: _copied(graph, source))


def _padding(value: fx.Node) -> list[fx.Node]:
    """Find each `qfuse::extend` that would pad the matrix, in a launch of its own."""
    transposed = [user for user in value.users if user.target is PERMUTE]
    found = [
        wide
        for user in transposed
        for wide in user.users
        if wide.target is EXTEND and _rights(wide)[-1:] == [user] and wide.args[3]
    ]
    return found if len({wide.args[3] for wide in found}) == 1 else []


def _rights(wide: fx.Node) -> list[fx.Node]:
    return list(cast("Sequence[fx.Node]", wide.args[2]))


def _padded(graph: fx.Graph, value: fx.Node, wide: Sequence[fx.Node]) -> fx.Node:
    """Put rows of zeros below a matrix, which are columns to those that read it transposed."""
    return emit(graph, PAD, (value, [0, 0, 0, wide[0].args[3]]), value) if wide else value


def _take(graph: fx.Graph, value: fx.Node, made: fx.Node, wide: Sequence[fx.Node]) -> fx.Node:
    """Return the matrix without its padding, with which each of `wide` reads it."""
    if not wide:
        return made
    for node in wide:
        last = emit(graph, PERMUTE, (made, [1, 0]), value)
        node.update_arg(2, [*_rights(node)[:-1], last])
        node.update_arg(3, 0)
    return emit(graph, SLICE, (made, 0, 0, tensor(value).shape[0]), value)
