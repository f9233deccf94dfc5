"""Read attention that a model writes out, as transformers does where torch's call lacks something.

That is `softmax(cap * tanh(query keyT * scale / cap) + mask) value` (Gemma 2), with `scale` alone
where nothing is capped, and with a sink: a score of each head beside those of the keys, whose share
of the softmax is dropped (gpt-oss). The mask is added: zero where a key is seen, the least number
of its dtype where not, which the softmax makes a zero.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import fx

from inductor_q.passes.dynamo_graph import same_size
from inductor_q.passes.grouped_keys import repeated, written_since

_SOFTMAX = (torch.nn.functional.softmax, torch.softmax, "softmax")
_MATMUL = (torch.matmul, operator.matmul, "matmul")
_CAST = ("to", "type_as", "float")
_DROPOUT = (torch.nn.functional.dropout, torch.dropout)
_MUL = (operator.mul, torch.mul, "mul")
_DIV = (operator.truediv, torch.div, "div")
_LAST = (-1, 3)


@dataclass(frozen=True)
class Written:
    """What such attention computes.

    Args:
        arguments: as those of scaled_dot_product_attention; the mask is the one that is added. Keys
            and values are as they were before they were repeated for groups of queries.
        softcap: what no score passes; None: nothing is capped.
        sinks: [heads], a score that takes its share of the softmax, or None.
    """

    arguments: dict[str, Any]
    softcap: float | None
    sinks: fx.Node | None


class _Other(Exception):
    """Why something like attention is not read."""


def read_written(node: fx.Node) -> Written | str | None:
    """Read the product with the values as attention; else the reason, or None where it is none."""
    if not _is_attention(node):
        return None
    try:
        return _Chain(node).read()
    except _Other as other:
        return f"attention is written out, but {other}"


def _is_attention(node: fx.Node) -> bool:
    """Whether a node is a product with weights that a softmax over the last of four dimensions
    makes."""
    weights: Any = node.args[0] if _called(node, *_MATMUL) and node.args else None
    while _called(weights, *_CAST, *_DROPOUT, operator.getitem):
        weights = weights.args[0]
    return (
        _called(weights, *_SOFTMAX)
        and _given(weights, 1, "dim") in _LAST
        and len(_shape(weights)) == 4
    )


class _Chain:
    """The nodes between the queries and the result, each read by the next one only."""

    def __init__(self, node: fx.Node) -> None:
        self._result = node

    def read(self) -> Written:
        weights, value = self._two(self._result, _MATMUL)
        weights = self._undropped(weights)
        cut = _called(weights, operator.getitem) and weights.args[1] == (..., slice(None, -1, None))
        softmax = self._alone(weights.args[0]) if cut else weights
        if not _called(softmax, *_SOFTMAX):
            raise _Other("some of its weights are left out")
        scores, sinks = self._sunk(softmax.args[0]) if cut else (softmax.args[0], None)
        plain, mask = self._two(self._alone(scores), (operator.add, torch.add, "add"))
        if _shape(mask)[1:2] != (1,):
            raise _Other("what is added to its scores is not a mask of all heads")
        plain, softcap = self._uncapped(self._alone(plain))
        product, scale = (plain, 1.0) if _called(plain, *_MATMUL) else self._scaled(plain, _MUL)
        query, turned = self._two(product, _MATMUL)
        if not _called(turned, "transpose", torch.transpose) or _sorted(turned) != (2, 3):
            raise _Other("queries meet what is not their keys")
        key, value = self._grouped(self._alone(turned).args[0], value)
        if _value(product).dtype != _value(self._result).dtype:
            raise _Other("its two products are not of one dtype")
        if written_since((query, key, value), self._result):
            raise _Other("something is written to in between")
        arguments = {"query": query, "key": key, "value": value, "attn_mask": mask}
        rest = {"dropout_p": 0.0, "is_causal": False, "scale": scale, "enable_gqa": True}
        return Written({**arguments, **rest}, softcap, sinks)

    def _alone(self, node: Any) -> fx.Node:
        """A node that nothing but the next one of the chain reads."""
        if not isinstance(node, fx.Node):
            raise _Other("an operand is no tensor")
        if len(node.users) != 1:
            raise _Other(f"{node.name} is read elsewhere, too")
        return node

    def _two(self, node: fx.Node, targets: tuple[Any, ...]) -> tuple[fx.Node, fx.Node]:
        if not _called(node, *targets) or len(node.args) != 2 or node.kwargs:
            raise _Other(f"{node.name} is not {_name(targets[0])} of two tensors")
        one, other = node.args
        if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
            raise _Other(f"{node.name} is not {_name(targets[0])} of two tensors")
        return one, other

    def _scaled(self, node: fx.Node, targets: tuple[Any, ...]) -> tuple[fx.Node, float]:
        """What a node multiplies with a number, or divides by one, and the number."""
        if not _called(node, *targets) or len(node.args) != 2 or node.kwargs:
            raise _Other(f"{node.name} is not {_name(targets[0])} by a number")
        by = node.args[1]
        if isinstance(_value(by), torch.SymFloat):  # an input by dynamic=True
            by = float(_value(by))  # a guard: a model's numbers do not change
        if not isinstance(by, (int, float)) or isinstance(by, bool) or by <= 0:
            raise _Other(f"{node.name} is not {_name(targets[0])} by a number")
        return self._alone(node.args[0]), float(by)

    def _undropped(self, node: fx.Node) -> fx.Node:
        node = self._alone(node)
        while _called(node, *_CAST, *_DROPOUT):
            keeps = fixed(_given(node, 1, "p")) == 0 or _given(node, 2, "training") is False
            if node.target in _DROPOUT and not keeps:
                raise _Other("its weights are dropped out, which FlexAttention does not")
            node = self._alone(node.args[0])
        return node

    def _sunk(self, node: Any) -> tuple[fx.Node, fx.Node]:
        """The scores beside which a column of sinks stands, and the sinks, one of each head."""
        node = self._alone(node)
        if _called(node, operator.sub, torch.sub, "sub"):
            joined, largest = node.args
            if not _is_largest(largest, joined):
                raise _Other("what is taken from scores and sinks is not their largest")
            assert isinstance(joined, fx.Node)  # as the largest is of it
            node = joined
            if len(node.users) != 2:
                raise _Other(f"{node.name} is read elsewhere, too")
        if not _called(node, torch.cat, torch.concat) or _given(node, 1, "dim") not in _LAST:
            raise _Other("a column of its weights is dropped that is no sink")
        parts: Any = node.args[0]
        if len(parts) != 2 or not _called(parts[1], "expand"):
            raise _Other("a column of its weights is dropped that is no sink")
        column = parts[1].args[0]
        sinks: Any = column.args[0] if _called(column, "reshape", "view") else None
        (heads, *more) = (*_shape(sinks), None)
        shape = _shape(column)
        if more != [None] or len(shape) != 4 or not same_size(shape[1], heads):
            raise _Other("its sinks are not one score of each head")
        return self._alone(parts[0]), sinks

    def _uncapped(self, node: fx.Node) -> tuple[fx.Node, float | None]:
        inner: Any = node.args[0] if node.args else None
        if not _called(inner, torch.tanh, "tanh"):
            return node, None
        _, cap = self._scaled(node, _MUL)
        below, by = self._scaled(self._alone(inner.args[0]), _DIV)
        if cap != by:
            raise _Other("its scores are capped by two numbers")
        return below, cap

    def _grouped(self, key: Any, value: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Keys and values as they were before they were repeated, if both were alike."""
        if not isinstance(key, fx.Node):
            raise _Other("queries meet what is not their keys")
        one, other = repeated(key), repeated(value)
        if one is None or other is None or not same_size(_shape(one)[1], _shape(other)[1]):
            return key, value
        return one, other


def fixed(value: Any) -> Any:
    """A number that dynamic=True makes an input of the graph, if a guard fixes it; else `value`."""
    number = _value(value)
    if isinstance(number, torch.SymFloat) and number.node.expr.is_number:
        return float(number)
    return value


def additive(mask: fx.Node) -> fx.Node | None:
    """The boolean mask that one to add is made of: zero where it is True, else the least number."""
    if mask.target is not torch.where or len(mask.args) != 3:
        return None
    seen, zero, least = mask.args
    if not isinstance(seen, fx.Node) or not isinstance(zero, fx.Node):
        return None
    made_zero = _called(zero, torch.zeros) and zero.args[0] in ((), ((),))
    if not made_zero and not (_called(zero, torch.tensor) and zero.args[0] == 0):
        return None
    return seen if fixed(least) in (torch.finfo(_value(mask).dtype).min, -torch.inf) else None


def _is_largest(node: Any, of: Any) -> bool:
    """Whether a node is the largest of the last dimension of `of`, which is kept."""
    if _called(node, operator.getitem) and node.args[1] == 0 and _called(node.args[0], "max"):
        found = node.args[0]
    elif _called(node, "amax", torch.amax):
        found = node
    else:
        return False
    keeps = _given(found, 2, "keepdim") is True
    return found.args[0] is of and _given(found, 1, "dim") in _LAST and keeps


def _called(node: Any, *targets: str | Callable[..., Any]) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and node.target in targets


def _given(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _sorted(node: fx.Node) -> tuple[Any, ...]:
    dims = [_given(node, 1, "dim0"), _given(node, 2, "dim1")]
    return tuple(sorted(d % 4 for d in dims if isinstance(d, int)))


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", target))


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def _shape(node: Any) -> tuple[Any, ...]:
    return tuple(getattr(_value(node), "shape", ()))
