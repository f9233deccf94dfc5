"""Compute a mask at other sizes by running the nodes of Dynamo's graph that make it.

Only what keeps the proof of `causal_mask` is run; of all else `NotProven` says what it is.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from inductor_q.passes.dynamo_graph import adds_nothing, called, expression, name, same_size
from inductor_q.passes.mask_meaning import LARGEST, SIZES

_FUNCTIONS = {
    *(torch.arange, torch.ones, torch.zeros, torch.full, torch.ones_like, torch.zeros_like),
    *(torch.diff, torch.cumsum, torch.logical_and, torch.logical_or, torch.logical_not),
    *(torch.where, torch.tensor, torch.transpose, torch.unsqueeze, operator.mul, torch.mul),
    *(operator.add, operator.sub, operator.and_, operator.or_, operator.invert, operator.getitem),
    *(operator.eq, operator.ne, operator.le, operator.lt, operator.ge, operator.gt),
    *(torch.eq, torch.ne, torch.le, torch.lt, torch.ge, torch.gt, torch.tril, torch.triu),
}
_METHODS = {
    *("expand", "unsqueeze", "squeeze", "view", "reshape", "to", "bool", "contiguous", "clone"),
    *("int", "long", "float", "mul", "transpose", "masked_fill"),
    *(
        "add",
        "sub",
        "cumsum",
        "diff",
        "new_ones",
        "new_zeros",
        "new_full",
        "logical_and",
        "logical_not",
    ),
    *("eq", "ne", "le", "lt", "ge", "gt", "tril", "triu"),
    *(f"__{name}__" for name in ("eq", "ne", "le", "lt", "ge", "gt", "and", "or", "invert")),
}
#: Those of a number per place, which mean inside of `vmap` what they mean outside.
_BY_PLACE = {
    *(operator.add, operator.sub, operator.and_, operator.or_, operator.invert, operator.mul),
    *(torch.where, torch.logical_and, torch.logical_or, torch.logical_not),
    *(operator.eq, operator.ne, operator.le, operator.lt, operator.ge, operator.gt),
    *("add", "sub", "to", "bool", "eq", "ne", "le", "lt", "ge", "gt"),
    *(f"__{name}__" for name in ("eq", "ne", "le", "lt", "ge", "gt", "and", "or", "invert")),
}
#: How a tensor is read by indices that are mapped over.
_INDEX = (torch.ops.aten.index, torch.ops.aten.index.Tensor)
#: Functions whose numbers are dimensions, which are no part of what is computed.
_OF_DIMENSIONS = ("unsqueeze", "squeeze", "transpose", torch.transpose, torch.unsqueeze)
_PRODUCTS = (operator.mul, torch.mul, "mul")
_PLAIN = (-1, 0, 1)
EXACT = (torch.bool, torch.int32, torch.int64)


class NotProven(Exception):
    """Why a mask is not known to be causal.

    Args:
        reason: that.
        number: what it is computed with and which a window may be long, if it is for this.
    """

    def __init__(self, reason: str, number: int | None = None) -> None:
        super().__init__(reason)
        self.number = number


def input_name(node: fx.Node) -> str:
    return str(node.target).removeprefix("L_").strip("_")


def _is_plain(value: Any) -> bool:
    """Whether a number or a tensor is of -1, 0 and 1, which every dtype holds that has them."""
    if isinstance(value, torch.Tensor):
        return bool(((value == 0) | (value == 1) | (value == -1)).all())
    return isinstance(value, int) and value in _PLAIN


class Evaluation:
    """The values of nodes on the CPU with some sizes replaced.

    Args:
        shape: the shape of the mask, [sequences, heads, S, S].
        numbers: what stands for sequences, for heads or copies, and for S.
        window: the length of a window, and what stands for it; None: none.
        outside: as of `read`.
        inputs: what is taken for inputs of the graph.
    """

    def __init__(
        self,
        shape: Sequence[int | torch.SymInt],
        numbers: tuple[int, int, int],
        window: tuple[int | None, int | None],
        outside: Mapping[fx.Node, fx.Node],
        inputs: Mapping[fx.Node, torch.Tensor],
    ) -> None:
        few, self._copies, size = numbers
        self._sizes = ((shape[-1], size), (shape[0], few), (shape[1], self._copies))
        self._copied = None if expression(shape[1]) in _PLAIN else expression(shape[1])
        self._window = window
        self._outside = outside
        self._known: dict[fx.Node, Any] = dict(inputs)
        self._mapped: set[fx.Node] = set()  # inside of vmap

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
            raise NotProven(f"the mask depends on the input {input_name(node)}")
        if adds_nothing(node):
            return self.of(node.all_input_nodes[0]).clone()
        if name(node) in ("_add_batch_dim", "_remove_batch_dim"):
            return self._run_mapping(node)
        listed = node.target in (_FUNCTIONS if node.op == "call_function" else _METHODS)
        if not listed and node.target not in _INDEX:
            raise NotProven(f"the mask is computed with {called(node)}")
        if any(self._is_mapped(given) for given in node.all_input_nodes):
            return self._run_mapped(node)
        if not listed:
            raise NotProven(f"the mask is computed with {called(node)} outside of vmap")
        return self._call(node)

    def _call(self, node: fx.Node) -> Any:
        called = node.target
        copies = called == "expand"
        if called in _OF_DIMENSIONS:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.of)
        else:
            args = self._arguments(node.args, copies=copies)
            kwargs = {n: self._arguments(value, copies=copies) for n, value in node.kwargs.items()}
        if called in _PRODUCTS and not any(map(_is_plain, args)):
            raise NotProven("the mask is computed with a product of numbers")
        with unset_fake_temporarily(), torch.no_grad():
            if callable(called):
                result = called(*args, **kwargs)
            else:
                result = getattr(args[0], called)(*args[1:], **kwargs)
        counts = not isinstance(result, torch.Tensor) or result.dtype in EXACT
        if not counts and not _is_plain(result):
            reason = f"{result.dtype}, which does not hold all positions"
            raise NotProven(f"the mask is computed in {reason}")
        return result

    def _is_mapped(self, node: fx.Node) -> bool:
        self.of(node)
        return self._outside.get(node, node) in self._mapped

    def _run_mapping(self, node: fx.Node) -> torch.Tensor:
        """Enter or leave `vmap`: its n-th level is the n-th of four dimensions."""
        numbers: list[Any]
        given, *numbers = node.args
        level = numbers[1] if name(node) == "_add_batch_dim" else numbers[0]
        assert isinstance(given, fx.Node), f"{given=}"
        rows: torch.Tensor = self.of(given)
        mapped = self._is_mapped(given)
        if isinstance(level, int) and level in range(1, 5):
            if name(node) == "_add_batch_dim" and rows.dim() == 1 and not mapped:
                self._mapped.add(node)
                return rows.view([-1 if n == level else 1 for n in range(1, 5)])
            inner: Any = given.args[1] if mapped and name(given) == "_remove_batch_dim" else 5
            if mapped and rows.dim() == 4 and numbers[2] == 0 and inner == level + 1:
                if level > 1:
                    self._mapped.add(node)
                size = self._arguments(numbers[1])
                return rows.expand([size if n == level else -1 for n in range(1, 5)])
        raise NotProven("the mask is computed with a vmap other than that of four numbers")

    def _run_mapped(self, node: fx.Node) -> Any:
        self._mapped.add(node)
        if node.target in _BY_PLACE:
            return self._call(node)
        made = node.target in ("new_ones", "new_zeros")
        if made and node.args[1] == () and "dtype" in node.kwargs:
            return self._call(node)
        if node.target in _INDEX:
            rows, index = node.args
            if isinstance(rows, fx.Node) and not self._is_mapped(rows):
                return self.of(rows)[self._arguments(index)]
        raise NotProven(f"the mask is computed with {name(node)} inside of vmap")

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
        if isinstance(value, float) and value not in _PLAIN:
            raise NotProven(f"the mask is computed with the number {value}")
        return value

    def _size(self, value: int | torch.SymInt, *, copies: bool = False) -> int:
        number = expression(value)
        if number in _PLAIN:  # an expression is compared as it is written: no guard
            return int(number)
        for size, small in self._sizes:
            if same_size(value, size):
                return small
        length, taken = self._window
        if taken is not None and number == length:
            return taken
        if copies and self._copied in (None, number):  # two numbers could tell by their difference
            self._copied = number
            return self._copies
        window = number if isinstance(number, int) and number > 0 else None
        raise NotProven(f"the mask is computed with the number {value}, as a window is", window)
