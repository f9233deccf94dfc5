"""Prove what an attention mask means: causal, over valid keys, inside documents, in a window.

Proven by running the nodes that make it, at small sizes: all of them must be on a list of pure
functions, be written to by no other node, and hold no number but -1, 0 and 1, and such as are
replaced: the mask's own sizes, a number of copies that `expand` makes, and the length of a window.
What a dtype cannot count, it may hold as zeros and ones, and a product has a factor of these.
At three positions no number may be large, so every distance that these numbers can make is small.
At 160 positions a window of such a small distance would show. So what holds at these sizes holds at
every size.

transformers 4 builds a mask by `torch.vmap` of a function of four numbers, which Dynamo writes down
as calls inside of it. These are run on tensors whose four dimensions are what was mapped over.

A mask may read two inputs of the graph, each with a row per sequence and a column per position. It
is then run on chosen rows, and compared with what it would be if an input were an `attention_mask`,
`position_ids` that begin again with each document, or a number of the sequence that each position
is of, some of which may stand for padding.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import unset_fake_temporarily

CHECKPOINT = "tag_activation_checkpoint"

#: The numbers of positions at which a mask is computed.
SIZES = (3, 8, 160)

#: The numbers taken for sequences, and for heads or copies: several pairs of them, since a
#: distance in the mask may happen to be one of them. No sum of the two is the same three times.
COUNTS = ((2, 4), (3, 2), (4, 3))

#: The lengths taken for a window at each number of positions, shorter and longer ones. They leave
#: room below LARGEST at the fewest.
WINDOWS = {3: (2, 5), 8: (2, 5, 11), 160: (2, 70, 159, 161)}

#: Which numbers of sequences are none of padding: how such a number compares with another.
SEQUENCES: dict[str, tuple[Callable[[Any, int], Any], int]] = {
    "!= 0": (operator.ne, 0),
    "> 0": (operator.gt, 0),
    ">= 0": (operator.ge, 0),
    "!= -1": (operator.ne, -1),
}

#: The pairs of rows that two inputs are given together.
PAIRS = 36

#: The largest number that a mask may be computed with at the fewest positions.
LARGEST = 16

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
#: Functions whose result is never a view of what they are given.
_NEW = (operator.add, operator.sub, operator.mul, operator.truediv, operator.matmul)
#: Functions whose numbers are dimensions, which are no part of what is computed.
_OF_DIMENSIONS = ("unsqueeze", "squeeze", "transpose", torch.transpose, torch.unsqueeze)
_PRODUCTS = (operator.mul, torch.mul, "mul")
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
    """Why a mask is not known to be causal.

    Args:
        reason: that.
        number: what it is computed with and which a window may be long, if it is for this.
    """

    def __init__(self, reason: str, number: int | None = None) -> None:
        super().__init__(reason)
        self.number = number


@dataclass(frozen=True)
class Meaning:
    """The keys that a proven mask lets a query see: itself and those before it, and of these:

    Args:
        valid: an input [B, S] of the graph, which is not zero for keys that are seen; None: any.
        positions: an input [B, S] that rises by one inside of each document, of which the query's
            is seen; None: any.
        window: how many positions are seen, the query's among them; None: any number.
        sequences: an input [B, S] of numbers, of which the query's is seen; None: any. A number may
            come again behind others.
        real: which of these numbers are seen at all, a key of SEQUENCES; "": all.

    Inputs are as large as the mask in this batch, but for one row that may stand for all: to rely
    on that in others, guard it.
    """

    valid: fx.Node | None = None
    positions: fx.Node | None = None
    window: int | None = None
    sequences: fx.Node | None = None
    real: str = ""

    @property
    def inputs(self) -> list[fx.Node]:
        given = (self.valid, self.positions, self.sequences)
        return [node for node in given if node is not None]


@dataclass(frozen=True)
class Unproven:
    """Why a mask is not known to be any of these."""

    reason: str


def read(
    mask: fx.Node, outside: Mapping[fx.Node, fx.Node], graphs: Iterable[fx.Graph]
) -> Meaning | Unproven:
    """Prove what `mask` means.

    Args:
        mask: a node of Dynamo's graph, bool, [..., S, S].
        outside: placeholders of subgraphs -> the nodes that they stand for, themselves where
            that is not one node.
        graphs: where the mask might be written to: Dynamo's graph and its subgraphs.
    """
    value = mask.meta.get("example_value")
    if mask.op == "placeholder":
        return Unproven(MADE_OUTSIDE)
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.bool or value.dim() != 4:
        return Unproven("the mask is not boolean and four-dimensional")
    if not same_size(value.shape[-2], value.shape[-1]):
        return Unproven("queries and keys differ in number")
    sources = _inputs(mask, outside)
    if not all(_is_by_position(source, value) for source in sources):
        sources = []
    reasons = []
    for meaning in _meanings(sources):
        disproof = _disproof(mask, meaning, outside, graphs)
        if disproof is not None and disproof.number is not None:
            meaning = replace(meaning, window=disproof.number)
            other = _disproof(mask, meaning, outside, graphs)
            disproof = disproof if str(other) == _ANOTHER else other
        if disproof is None:
            return meaning
        reasons.append(str(disproof))
    telling = [reason for reason in reasons if reason != _ANOTHER]
    if sources and not telling:
        names = " and ".join(map(_input_name, sources))
        inputs = f"input {names}" if len(sources) == 1 else f"inputs {names}"
        return Unproven(f"the mask depends on the {inputs} in a way that is not known")
    return Unproven((telling or reasons)[0])


def _meanings(sources: Sequence[fx.Node]) -> list[Meaning]:
    """What a mask of these inputs may mean, without a window."""
    if len(sources) == 1:
        meanings = [Meaning(valid=sources[0]), Meaning(positions=sources[0])]
        return meanings + [Meaning(sequences=sources[0], real=real) for real in ("", *SEQUENCES)]
    if len(sources) == 2:
        pairs = (sources, sources[::-1])
        meanings = [Meaning(valid, positions) for valid, positions in pairs]
        for valid, numbers in pairs:
            meanings += [Meaning(valid, sequences=numbers, real=r) for r in ("", *SEQUENCES)]
        return meanings
    return [Meaning()]  # of more than two, running it tells what it depends on


_ANOTHER = "the mask is another than the causal one"

MADE_OUTSIDE = (
    "the mask is an input of the graph, which does not show what it means: make it inside of what "
    "is compiled, of an attention_mask, position_ids or sequence ids of [B, S]"
)


def _disproof(
    mask: fx.Node,
    meaning: Meaning,
    outside: Mapping[fx.Node, fx.Node],
    graphs: Iterable[fx.Graph],
) -> _NotProven | None:
    """None if `mask` means that; else the reason why it is not known to."""
    shape = mask.meta["example_value"].shape
    try:
        for size, (few, copies) in itertools.product(SIZES, COUNTS):
            for inputs, window in _chosen(meaning, few, size):
                numbers = few, copies, size
                evaluation = _Evaluation(shape, numbers, (meaning.window, window), outside, inputs)
                found = evaluation.of(mask)
                expected = _expected(meaning, inputs, size, window)
                if found.shape[-2:] != (size, size) or not _equal(found, expected):
                    return _NotProven(_ANOTHER)
                if size == SIZES[0] and evaluation.is_large():
                    reason = "sums or copies as large as a window may be"
                    return _NotProven(f"the mask is computed with {reason}")
        if written := written_to(evaluation.nodes(), outside, graphs):
            return _NotProven(f"the mask, or what it is made of, is written to by {written}")
    except _NotProven as reason:
        return reason
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        return _NotProven(f"the mask could not be computed at other sizes: {error}")
    return None


def _equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether a mask [b, h, S, S] is `expected` [b or 1, 1, S, S] for every head."""
    try:
        one, other = torch.broadcast_tensors(found, expected)
    except RuntimeError:
        return False
    return torch.equal(one, other)


def _expected(
    meaning: Meaning, inputs: Mapping[fx.Node, torch.Tensor], size: int, window: int | None
) -> torch.Tensor:
    place = torch.arange(size)
    behind = place[:, None] - place
    mask = ((behind >= 0) & (behind < (window or size)))[None, None]
    if meaning.valid is not None:
        mask = mask & (inputs[meaning.valid] != 0)[:, None, None, :]
    if meaning.positions is not None:
        rows = inputs[meaning.positions]
        begins = torch.ones_like(rows, dtype=torch.bool)
        begins[:, 1:] = rows[:, 1:] != rows[:, :-1] + 1
        document = begins.cumsum(-1)
        mask = mask & (document[:, None, :, None] == document[:, None, None, :])
    if meaning.sequences is not None:
        rows = inputs[meaning.sequences]
        mask = mask & (rows[:, None, :, None] == rows[:, None, None, :])
        if meaning.real:
            compares, number = SEQUENCES[meaning.real]
            mask = mask & compares(rows, number)[:, None, None, :]
    return mask


def _chosen(
    meaning: Meaning, few: int, size: int
) -> Iterator[tuple[dict[fx.Node, torch.Tensor], int | None]]:
    """What a mask's inputs and its window are, together: each with each at few positions."""
    windows = (None,) if meaning.window is None else WINDOWS[size]
    rows = list(_inputs_of(meaning, few, size))
    if size < SIZES[-1]:
        yield from itertools.product(rows, windows)
        return
    for i in range(max(len(rows), len(windows))):
        yield rows[i % len(rows)], windows[i % len(windows)]


def _inputs_of(meaning: Meaning, few: int, size: int) -> Iterator[dict[fx.Node, torch.Tensor]]:
    """The rows that a mask's inputs are given: at few positions every pattern of validity, at more
    of them some. Two inputs meet in many pairs."""
    generator = torch.Generator().manual_seed(size * few)
    given: dict[fx.Node, torch.Tensor] = {}
    if meaning.valid is not None:
        given[meaning.valid] = _validity(size, generator)
    if meaning.positions is not None:
        given[meaning.positions] = _positions(size, generator)
    if meaning.sequences is not None:
        given[meaning.sequences] = _sequences(size, generator)
    if not given:
        yield {}
        return
    if len(given) == 2:
        one, other = given.values()
        pairs = torch.cartesian_prod(torch.arange(len(one)), torch.arange(len(other)))
        pairs = pairs[torch.randperm(len(pairs), generator=generator)[:PAIRS]]
        given = {n: x[at] for (n, x), at in zip(given.items(), pairs.T, strict=True)}
    count = len(next(iter(given.values())))
    sequences = {node: _few(node.meta["example_value"].shape[0], few) for node in given}
    most = max(sequences.values())
    for start in range(0, count - most + 1, most):
        yield {
            node: rows[start : start + sequences[node]].to(node.meta["example_value"].dtype)
            for node, rows in given.items()
        }


def _few(sequences: int | torch.SymInt, few: int) -> int:
    return 1 if _expression(sequences) == 1 else few


def _validity(size: int, generator: torch.Generator) -> torch.Tensor:
    """Rows of zeros where padding is; numbers other than 0 and 1 are among them."""
    few_valid, most_valid = (torch.randint(n, (8, size), generator=generator) for n in (4, 8))
    padded = torch.arange(size) < torch.tensor([[0], [1], [size // 2], [size]])
    patterns = torch.cat([few_valid == 0, most_valid != 0, padded, padded.flip(1)]).long()
    if size == SIZES[0]:
        patterns = torch.cartesian_prod(*[torch.arange(2)] * size)
    return torch.cat([patterns, patterns[:4] * 3])


def _positions(size: int, generator: torch.Generator) -> torch.Tensor:
    """Rows that begin again with each document, from small numbers; some are of one position."""
    starts = torch.randint(3, (12, size), generator=generator) == 0
    starts = torch.cat([starts, torch.zeros(1, size) != 0, torch.ones(1, size) != 0])
    rows = torch.where(starts, torch.randint(3, starts.shape, generator=generator), 0)
    for place in range(1, size):
        rows[:, place] += torch.where(starts[:, place], 0, rows[:, place - 1] + 1)
    return rows


def _sequences(size: int, generator: torch.Generator) -> torch.Tensor:
    """Rows of sequences' numbers, 0 and -1 among them: at few positions every pattern; at more some
    of which each number comes once, rising and falling, and some of which it comes again. Some are
    larger than the number of positions, and some differ by what 32 bits do not hold."""
    if size == SIZES[0]:
        small, far = torch.arange(-2, 3), torch.tensor([-7, 0, 1, 7])
        return torch.cat([torch.cartesian_prod(*[some] * size) for some in (small, far)])
    starts = torch.randint(4, (16, size), generator=generator) == 0
    rising = starts.cumsum(-1) + torch.randint(-3, 2, (16, 1), generator=generator)
    padded = torch.arange(size) < torch.tensor([[1], [size // 2], [size - 1], [size]])
    padded = torch.where(padded, rising[:4], torch.tensor([[0], [-1], [-2], [0]]))
    again = torch.randint(-3, 4, (8, size), generator=generator)
    return torch.cat([padded, rising, rising.flip(1), again, again * 2 * size, again << 32])


def _inputs(mask: fx.Node, outside: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    """The tensors among the graph's inputs that `mask` is computed from; sizes are no tensors."""
    seen: dict[fx.Node, None] = {}
    ahead = [outside.get(mask, mask)]
    while ahead:
        node = ahead.pop()
        if node not in seen:
            seen[node] = None
            if not isinstance(node.meta.get("example_value"), (int, torch.SymInt)):
                ahead += [outside.get(given, given) for given in node.all_input_nodes]
    tensors = (n for n in seen if isinstance(n.meta.get("example_value"), torch.Tensor))
    return [node for node in tensors if node.op == "placeholder"]


def _is_by_position(node: fx.Node, mask: torch.Tensor) -> bool:
    """Whether an input has a whole number per sequence and position of the mask."""
    value = node.meta["example_value"]
    if value.dtype not in _EXACT or value.dim() != 2:
        return False
    sequences = _alike(value.shape[0], mask.shape[0]) or _expression(value.shape[0]) == 1
    return sequences and _alike(value.shape[1], mask.shape[-1])


def _alike(one: Any, other: Any) -> bool:
    """Whether two sizes are one, or two symbols for one number, which whoever uses it must guard.

    Dynamo gives each input symbols of its own, where nothing in the program makes them equal.
    """
    hints = [size.node.hint for size in (one, other) if isinstance(size, torch.SymInt)]
    return same_size(one, other) or (len(hints) == 2 and None not in hints and hints[0] == hints[1])


def _input_name(node: fx.Node) -> str:
    return str(node.target).removeprefix("L_").strip("_")


def written_to(
    nodes: set[fx.Node], outside: Mapping[fx.Node, fx.Node], graphs: Iterable[fx.Graph]
) -> str:
    """Name the node that writes in place to one of `nodes` or to a view of one; "" if none does."""
    for node in (n for graph in graphs for n in graph.nodes if not _adds_nothing(n)):
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


def _called(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _adds_nothing(node: fx.Node) -> bool:
    """Whether a node is `x += 0`, as transformers 4 writes an offset."""
    return node.target is operator.iadd and type(node.args[1]) is int and node.args[1] == 0


def _name(node: fx.Node) -> str:
    return _called(node).partition(".")[0]


def written_by(node: fx.Node) -> list[fx.Node]:
    """Find the arguments that a node may write to.

    An operator whose schema says only that it writes may write to all of them. The bodies of
    checkpoints are graphs that are looked at by themselves.
    """
    target, called = node.target, _name(node)
    if isinstance(target, HigherOrderOperator):
        return [] if called == CHECKPOINT else list(node.all_input_nodes)
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        given = (a for schema in _schemas(target) for a in schema.arguments if _is_given(a, node))
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in given)
        return list(node.all_input_nodes) if writes else []
    out = node.kwargs.get("out")
    found = [*out] if isinstance(out, (tuple, list)) else [out]
    ends = called.endswith("_") and not called.endswith("__")
    if called in _INPLACE or (ends and target not in _FUNCTIONS):  # operator.and_
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


def same_size(one: Any, other: Any) -> bool:
    """Whether two sizes are one number, or one expression of symbols; adds no guard."""
    return bool(_expression(one) == _expression(other))


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _is_plain(value: Any) -> bool:
    """Whether a number or a tensor is of -1, 0 and 1, which every dtype holds that has them."""
    if isinstance(value, torch.Tensor):
        return bool(((value == 0) | (value == 1) | (value == -1)).all())
    return isinstance(value, int) and value in _PLAIN


class _Evaluation:
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
        self._copied = None if _expression(shape[1]) in _PLAIN else _expression(shape[1])
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
            raise _NotProven(f"the mask depends on the input {_input_name(node)}")
        if _adds_nothing(node):
            return self.of(node.all_input_nodes[0]).clone()
        if _name(node) in ("_add_batch_dim", "_remove_batch_dim"):
            return self._run_mapping(node)
        listed = node.target in (_FUNCTIONS if node.op == "call_function" else _METHODS)
        if not listed and node.target not in _INDEX:
            raise _NotProven(f"the mask is computed with {_called(node)}")
        if any(self._is_mapped(given) for given in node.all_input_nodes):
            return self._run_mapped(node)
        if not listed:
            raise _NotProven(f"the mask is computed with {_called(node)} outside of vmap")
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
            raise _NotProven("the mask is computed with a product of numbers")
        with unset_fake_temporarily(), torch.no_grad():
            if callable(called):
                result = called(*args, **kwargs)
            else:
                result = getattr(args[0], called)(*args[1:], **kwargs)
        counts = not isinstance(result, torch.Tensor) or result.dtype in _EXACT
        if not counts and not _is_plain(result):
            reason = f"{result.dtype}, which does not hold all positions"
            raise _NotProven(f"the mask is computed in {reason}")
        return result

    def _is_mapped(self, node: fx.Node) -> bool:
        self.of(node)
        return self._outside.get(node, node) in self._mapped

    def _run_mapping(self, node: fx.Node) -> torch.Tensor:
        """Enter or leave `vmap`: its n-th level is the n-th of four dimensions."""
        numbers: list[Any]
        given, *numbers = node.args
        level = numbers[1] if _name(node) == "_add_batch_dim" else numbers[0]
        assert isinstance(given, fx.Node), f"{given=}"
        rows: torch.Tensor = self.of(given)
        mapped = self._is_mapped(given)
        if isinstance(level, int) and level in range(1, 5):
            if _name(node) == "_add_batch_dim" and rows.dim() == 1 and not mapped:
                self._mapped.add(node)
                return rows.view([-1 if n == level else 1 for n in range(1, 5)])
            inner: Any = given.args[1] if mapped and _name(given) == "_remove_batch_dim" else 5
            if mapped and rows.dim() == 4 and numbers[2] == 0 and inner == level + 1:
                if level > 1:
                    self._mapped.add(node)
                size = self._arguments(numbers[1])
                return rows.expand([size if n == level else -1 for n in range(1, 5)])
        raise _NotProven("the mask is computed with a vmap other than that of four numbers")

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
        raise _NotProven(f"the mask is computed with {_name(node)} inside of vmap")

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
            raise _NotProven(f"the mask is computed with the number {value}")
        return value

    def _size(self, value: int | torch.SymInt, *, copies: bool = False) -> int:
        number = _expression(value)
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
        raise _NotProven(f"the mask is computed with the number {value}, as a window is", window)
