"""Whether an attention mask that a graph computes is the causal one.

Proven by running the nodes that make it, at small sizes: all of them must be on a list of pure
functions, read no input of the graph, be written to by no other node, and hold no number but -1, 0
and 1, and such as are replaced: the mask's own sizes, and a number of copies that `expand` makes. A
distance that these numbers make is the same at three positions, where nothing may be large, and at
160, where a window that is not would show. So what holds for every pair of positions at these
sizes holds at all.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import unset_fake_temporarily

CHECKPOINT = "tag_activation_checkpoint"

#: Positions.
SIZES = (3, 8, 160)

#: What stands for the number of sequences, and for that of heads or copies: several, since a
#: distance in the mask may happen to be one of them. No sum of the two is the same three times.
COUNTS = ((2, 4), (3, 2), (4, 3))

#: The largest number that a mask may be computed with at the fewest positions.
LARGEST = 16

_FUNCTIONS = {
    *(torch.arange, torch.ones, torch.zeros, torch.full, torch.ones_like, torch.zeros_like),
    *(torch.diff, torch.cumsum, torch.logical_and, torch.logical_or, torch.logical_not),
    *(operator.add, operator.sub, operator.and_, operator.or_, operator.invert, operator.getitem),
    *(operator.eq, operator.ne, operator.le, operator.lt, operator.ge, operator.gt),
    *(torch.eq, torch.ne, torch.le, torch.lt, torch.ge, torch.gt, torch.tril, torch.triu),
}
_METHODS = {
    *("expand", "unsqueeze", "squeeze", "view", "reshape", "to", "bool", "contiguous", "clone"),
    *("cumsum", "diff", "new_ones", "new_zeros", "new_full", "logical_and", "logical_not"),
    *("eq", "ne", "le", "lt", "ge", "gt", "tril", "triu"),
    *(f"__{name}__" for name in ("eq", "ne", "le", "lt", "ge", "gt", "and", "or", "invert")),
}
#: What they return is never a view of what they are given.
_NEW = (operator.add, operator.sub, operator.mul, operator.truediv, operator.matmul)
_PLAIN = (-1, 0, 1)
_EXACT = (torch.bool, torch.int32, torch.int64)
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


class _NotProven(Exception):
    """Why a mask is not known to be causal."""


def why_not_causal(
    mask: fx.Node, outside: Mapping[fx.Node, fx.Node], graphs: Iterable[fx.Graph]
) -> str:
    """Empty if `mask` is True for keys up to the query and False after it; else the reason.

    Args:
        mask: a node of Dynamo's graph, bool, [..., S, S].
        outside: placeholders of subgraphs -> the nodes that they stand for, themselves where
            that is not one node.
        graphs: where the mask might be written to: Dynamo's graph and its subgraphs.
    """
    value = mask.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.bool or value.dim() != 4:
        return "the mask is not boolean and four-dimensional"
    if not same_size(value.shape[-2], value.shape[-1]):
        return "queries and keys differ in number"
    try:
        for size, (few, copies) in itertools.product(SIZES, COUNTS):
            evaluation = _Evaluation(value.shape, (few, copies, size), outside)
            found = evaluation.of(mask)
            causal = torch.ones(size, size, dtype=torch.bool).tril()
            if found.shape[-2:] != causal.shape or not torch.equal(found, causal.expand_as(found)):
                return "the mask is another than the causal one"
            if size == SIZES[0] and evaluation.is_large():
                return "the mask is computed with sums or copies as large as a window may be"
        if written := _written(evaluation.nodes(), outside, graphs):
            return f"the mask, or what it is made of, is written to by {written}"
    except _NotProven as reason:
        return str(reason)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        return f"the mask could not be computed at other sizes: {error}"
    return ""


def _written(
    nodes: set[fx.Node], outside: Mapping[fx.Node, fx.Node], graphs: Iterable[fx.Graph]
) -> str:
    """What writes in place to one of `nodes`, or to a view of one; "" if nothing does."""
    for node in (n for graph in graphs for n in graph.nodes):
        for written in written_by(node):
            base: Any = written
            while isinstance(base, fx.Node):
                given = outside.get(base, base)
                if given in nodes or outside.get(given) is given:  # that one is not known
                    return _name(node)
                if given.target in _NEW:
                    break
                # a view's base is its first argument
                base = given.args[0] if given.args else next(iter(given.all_input_nodes), None)
    return ""


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]


def written_by(node: fx.Node) -> list[fx.Node]:
    """What a node may write to; of operators that say no more than that they write, all they get.
    The bodies of checkpoints are looked at by themselves."""
    target, called = node.target, _name(node)
    if isinstance(target, HigherOrderOperator):
        return [] if called == CHECKPOINT else list(node.all_input_nodes)
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return list(node.all_input_nodes) if any(s.is_mutable for s in _schemas(target)) else []
    out = node.kwargs.get("out")
    found = [*out] if isinstance(out, (tuple, list)) else [out]
    ends = called.endswith("_") and not called.endswith("__")
    if called in _INPLACE or (ends and target not in _FUNCTIONS):  # operator.and_
        first = node.args[0] if node.args else list(node.all_input_nodes)
        found += [*first] if isinstance(first, (tuple, list)) else [first]
    return [node for node in found if isinstance(node, fx.Node)]


def _schemas(target: OpOverload | OpOverloadPacket) -> list[Any]:
    if isinstance(target, OpOverload):
        return [target._schema]
    return [getattr(target, name)._schema for name in target.overloads()]


def same_size(one: Any, other: Any) -> bool:
    """Whether two sizes are one number, or one expression of symbols; adds no guard."""
    return bool(_expression(one) == _expression(other))


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


class _Evaluation:
    """The values of nodes on the CPU with some sizes replaced.

    Args:
        shape: of the mask, [sequences, heads, S, S].
        numbers: what stands for sequences, for heads or copies, and for S.
        outside: as of `why_not_causal`.
    """

    def __init__(
        self,
        shape: Sequence[int | torch.SymInt],
        numbers: tuple[int, int, int],
        outside: Mapping[fx.Node, fx.Node],
    ) -> None:
        few, self._copies, size = numbers
        self._sizes = ((shape[-1], size), (shape[0], few), (shape[1], self._copies))
        self._copied = None if _expression(shape[1]) in _PLAIN else _expression(shape[1])
        self._outside = outside
        self._known: dict[fx.Node, Any] = {}

    def nodes(self) -> set[fx.Node]:
        """The tensors among what was run: a size is given to operators that write, and is not
        written to."""
        return {node for node, value in self._known.items() if isinstance(value, torch.Tensor)}

    def is_large(self) -> bool:
        """Whether a number passes LARGEST, or a tensor has a window's length if it is flattened."""
        tensors = [v for v in self._known.values() if isinstance(v, torch.Tensor)]
        return any(
            v.numel() >= SIZES[-1] or bool(((v > LARGEST) | (v < -LARGEST)).any()) for v in tensors
        )

    def of(self, node: fx.Node) -> Any:
        node = self._outside.get(node, node)
        if node not in self._known:
            self._known[node] = self._run(node)
        return self._known[node]

    def _run(self, node: fx.Node) -> Any:
        value = node.meta.get("example_value")
        if isinstance(value, (int, torch.SymInt)):
            return self._size(value)
        if node.op == "placeholder":
            name = str(node.target).removeprefix("L_").strip("_")
            raise _NotProven(f"the mask depends on the input {name}: it may hold padding")
        called, functions = node.target, node.op == "call_function"
        if not (called in _FUNCTIONS if functions else called in _METHODS):
            raise _NotProven(f"the mask is computed with {getattr(called, '__name__', called)}")
        copies = called == "expand"
        args = self._arguments(node.args, copies=copies)
        kwargs = {n: self._arguments(value, copies=copies) for n, value in node.kwargs.items()}
        with unset_fake_temporarily(), torch.no_grad():
            if callable(called):
                return called(*args, **kwargs)
            return getattr(args[0], called)(*args[1:], **kwargs)

    def _arguments(self, value: Any, *, copies: bool = False) -> Any:
        if isinstance(value, fx.Node):
            return self.of(value)
        if isinstance(value, (tuple, list)):
            return tuple(self._arguments(v, copies=copies) for v in value)
        if isinstance(value, slice):
            return slice(*(self._arguments(v) for v in (value.start, value.stop, value.step)))
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, int) and not isinstance(value, bool):
            return self._size(value, copies=copies)
        if isinstance(value, torch.dtype) and value not in _EXACT:
            raise _NotProven(f"the mask is computed in {value}, which does not hold all positions")
        if isinstance(value, float):
            raise _NotProven(f"the mask is computed with the number {value}")
        return value

    def _size(self, value: int | torch.SymInt, *, copies: bool = False) -> int:
        number = _expression(value)
        if number in _PLAIN:  # an expression is compared as it is written: no guard
            return int(number)
        for size, small in self._sizes:
            if same_size(value, size):
                return small
        if copies and self._copied in (None, number):  # two numbers could tell by their difference
            self._copied = number
            return self._copies
        raise _NotProven(f"the mask is computed with the number {value}, as a window is")
