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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from inductor_q.passes.dynamo_graph import expression, same_size, written_to
from inductor_q.passes.mask_meaning import (
    COMPARED,
    COUNTS,
    SIZES,
    VALID,
    Meaning,
    chosen,
    expected_mask,
)
from inductor_q.passes.mask_values import EXACT, Evaluation, NotProven, input_name

_ANOTHER = "the mask is another than the causal one"

MADE_OUTSIDE = (
    "the mask is an input of the graph, which does not show what it means: make it inside of what "
    "is compiled, of an attention_mask, position_ids or sequence ids of [B, S]"
)


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
        names = " and ".join(map(input_name, sources))
        inputs = f"input {names}" if len(sources) == 1 else f"inputs {names}"
        return Unproven(f"the mask depends on the {inputs} in a way that is not known")
    return Unproven((telling or reasons)[0])


def _meanings(sources: Sequence[fx.Node]) -> list[Meaning]:
    """What a mask of these inputs may mean, without a window."""
    if len(sources) == 1:
        meanings = [Meaning(valid=sources[0], is_valid=numbers) for numbers in VALID]
        meanings += [Meaning(positions=sources[0])]
        return meanings + [Meaning(sequences=sources[0], real=real) for real in ("", *COMPARED)]
    if len(sources) == 2:
        pairs = (sources, sources[::-1])
        meanings = [Meaning(valid, positions) for valid, positions in pairs]
        for valid, numbers in pairs:
            meanings += [Meaning(valid, sequences=numbers, real=r) for r in ("", *COMPARED)]
        return [replace(meaning, is_valid=numbers) for numbers in VALID for meaning in meanings]
    return [Meaning()]  # of more than two, running it tells what it depends on


def _disproof(
    mask: fx.Node,
    meaning: Meaning,
    outside: Mapping[fx.Node, fx.Node],
    graphs: Iterable[fx.Graph],
) -> NotProven | None:
    """None if `mask` means that; else the reason why it is not known to."""
    shape = mask.meta["example_value"].shape
    try:
        for size, (few, copies) in itertools.product(SIZES, COUNTS):
            for inputs, window in chosen(meaning, few, size):
                numbers = few, copies, size
                evaluation = Evaluation(shape, numbers, (meaning.window, window), outside, inputs)
                found = evaluation.of(mask)
                expected = expected_mask(meaning, inputs, size, window)
                if found.shape[-2:] != (size, size) or not _equal(found, expected):
                    return NotProven(_ANOTHER)
                if size == SIZES[0] and evaluation.is_large():
                    reason = "sums or copies as large as a window may be"
                    return NotProven(f"the mask is computed with {reason}")
        if written := written_to(evaluation.nodes(), outside, graphs):
            return NotProven(f"the mask, or what it is made of, is written to by {written}")
    except NotProven as reason:
        return reason
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        return NotProven(f"the mask could not be computed at other sizes: {error}")
    return None


def _equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether a mask [b, h, S, S] is `expected` [b or 1, 1, S, S] for every head."""
    try:
        one, other = torch.broadcast_tensors(found, expected)
    except RuntimeError:
        return False
    return torch.equal(one, other)


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
    if value.dtype not in EXACT or value.dim() != 2:
        return False
    sequences = _alike(value.shape[0], mask.shape[0]) or expression(value.shape[0]) == 1
    return sequences and _alike(value.shape[1], mask.shape[-1])


def _alike(one: Any, other: Any) -> bool:
    """Whether two sizes are one, or two symbols for one number, which whoever uses it must guard.

    Dynamo gives each input symbols of its own, where nothing in the program makes them equal.
    """
    hints = [size.node.hint for size in (one, other) if isinstance(size, torch.SymInt)]
    return same_size(one, other) or (len(hints) == 2 and None not in hints and hints[0] == hints[1])
