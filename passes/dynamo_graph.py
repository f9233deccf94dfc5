"""Read Dynamo's graph: whether two sizes are one, what a node calls, and what it writes to."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

CHECKPOINT = "tag_activation_checkpoint"

#: Functions whose result is never a view of what they are given.
_NEW = (operator.add, operator.sub, operator.mul, operator.truediv, operator.matmul)
_UPDATES = (
    *("add", "and", "floordiv", "lshift", "mod", "mul"),
    *("or", "pow", "rshift", "sub", "truediv", "xor"),
)
_INPLACE = {
    "setitem",
    "__setitem__",
    *(f"i{name}" for name in _UPDATES),
    *(f"__i{name}__" for name in _UPDATES),
}
#: Functions whose names end as those of methods that write do, and which write to nothing.
_LIKE_INPLACE = (operator.and_, operator.or_)


def same_size(one: Any, other: Any) -> bool:
    """Whether two sizes are one number, or one expression of symbols; adds no guard."""
    return bool(expression(one) == expression(other))


def expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def called(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def name(node: fx.Node) -> str:
    return called(node).partition(".")[0]


def is_transformed(node: fx.Node) -> bool:
    """Whether the value belongs to a transform of torch.func, outside of which nothing is computed
    from it."""
    value = node.meta.get("example_value")
    wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor
    return isinstance(value, torch.Tensor) and bool(wrapped(value))


def adds_nothing(node: fx.Node) -> bool:
    """Whether a node is `x += 0`, as transformers 4 writes an offset."""
    return node.target is operator.iadd and type(node.args[1]) is int and node.args[1] == 0


def written_to(
    nodes: set[fx.Node], outside: Mapping[fx.Node, fx.Node], graphs: Iterable[fx.Graph]
) -> str:
    """Name the node that writes in place to one of `nodes` or to a view of one; "" if none does."""
    for node in (n for graph in graphs for n in graph.nodes if not adds_nothing(n)):
        for written in written_by(node):
            base: Any = written
            while isinstance(base, fx.Node):
                given = outside.get(base, base)
                if given in nodes or outside.get(given) is given:  # that one is not known
                    return name(node)
                if given.target in _NEW:
                    break
                # a view's base is its first argument
                base = given.args[0] if given.args else next(iter(given.all_input_nodes), None)
    return ""


def written_by(node: fx.Node) -> list[fx.Node]:
    """Find the arguments that a node may write to.

    An operator whose schema says only that it writes may write to all of them. The bodies of
    checkpoints are graphs that are looked at by themselves.
    """
    target, called = node.target, name(node)
    if isinstance(target, HigherOrderOperator):
        return [] if called == CHECKPOINT else list(node.all_input_nodes)
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        given = (a for schema in _schemas(target) for a in schema.arguments if _is_given(a, node))
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in given)
        return list(node.all_input_nodes) if writes else []
    out = node.kwargs.get("out")
    found = [*out] if isinstance(out, (tuple, list)) else [out]
    ends = called.endswith("_") and not called.endswith("__")
    if called in _INPLACE or (ends and target not in _LIKE_INPLACE):
        first = node.args[0] if node.args else list(node.all_input_nodes)
        found += [*first] if isinstance(first, (tuple, list)) else [first]
    return [node for node in found if isinstance(node, fx.Node)]


def _is_given(argument: Any, node: fx.Node) -> bool:
    """Whether a call may have this argument of a schema: one without `out` writes to none."""
    return not argument.kwarg_only or argument.name in node.kwargs


def _schemas(target: OpOverload | OpOverloadPacket) -> list[Any]:
    if isinstance(target, OpOverload):
        return [target._schema]
    return [getattr(target, name)._schema for name in target.overloads()]
