"""What an attention mask may mean, and which keys it then shows for inputs of a few positions."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from inductor_q.passes.dynamo_graph import expression

#: The numbers of positions at which a mask is computed.
SIZES = (3, 8, 160)

#: The numbers taken for sequences, and for heads or copies: several pairs of them, since a
#: distance in the mask may happen to be one of them. No sum of the two is the same three times.
COUNTS = ((2, 4), (3, 2), (4, 3))

#: The lengths taken for a window at each number of positions, shorter and longer ones. They leave
#: room below LARGEST at the fewest.
WINDOWS = {3: (2, 5), 8: (2, 5, 11), 160: (2, 70, 159, 161)}

#: The largest number that a mask may be computed with at the fewest positions.
LARGEST = 16

#: How the numbers that are none of padding compare with another.
COMPARED: dict[str, tuple[Callable[[Any, int], Any], int]] = {
    "!= 0": (operator.ne, 0),
    "> 0": (operator.gt, 0),
    ">= 0": (operator.ge, 0),
    "!= -1": (operator.ne, -1),
}
#: Those of an `attention_mask`.
VALID = ("!= 0", "> 0")

#: The pairs of rows that two inputs are given together.
PAIRS = 36


@dataclass(frozen=True)
class Meaning:
    """The keys that a proven mask lets a query see: itself and those before it, and of these:

    Args:
        valid: an input [B, S] of the graph, whose numbers say which keys are seen; None: any.
        is_valid: those that are, a key of COMPARED.
        positions: an input [B, S] that rises by one inside of each document, of which the query's
            is seen; None: any.
        window: how many positions are seen, the query's among them; None: any number.
        sequences: an input [B, S] of numbers, of which the query's is seen; None: any. A number may
            come again behind others.
        real: which of these numbers are seen at all, a key of COMPARED; "": all.

    Inputs are as large as the mask in this batch, but for one row that may stand for all: to rely
    on that in others, guard it.
    """

    valid: fx.Node | None = None
    positions: fx.Node | None = None
    window: int | None = None
    sequences: fx.Node | None = None
    real: str = ""
    is_valid: str = VALID[0]

    @property
    def inputs(self) -> list[fx.Node]:
        given = (self.valid, self.positions, self.sequences)
        return [node for node in given if node is not None]


def expected_mask(
    meaning: Meaning, inputs: Mapping[fx.Node, torch.Tensor], size: int, window: int | None
) -> torch.Tensor:
    """Return the mask [b, 1, S, S] of these inputs: True where a query sees a key."""
    place = torch.arange(size)
    behind = place[:, None] - place
    mask = ((behind >= 0) & (behind < (window or size)))[None, None]
    if meaning.valid is not None:
        compares, number = COMPARED[meaning.is_valid]
        mask = mask & compares(inputs[meaning.valid], number)[:, None, None, :]
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
            compares, number = COMPARED[meaning.real]
            mask = mask & compares(rows, number)[:, None, None, :]
    return mask


def chosen(
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
    return 1 if expression(sequences) == 1 else few


def _validity(size: int, generator: torch.Generator) -> torch.Tensor:
    """Rows of zeros where padding is; numbers other than 0 and 1 are among them, negative ones and,
    at more positions, such as 32 bits do not hold."""
    few_valid, most_valid = (torch.randint(n, (8, size), generator=generator) for n in (4, 8))
    padded = torch.arange(size) < torch.tensor([[0], [1], [size // 2], [size]])
    patterns = torch.cat([few_valid == 0, most_valid != 0, padded, padded.flip(1)]).long()
    if size == SIZES[0]:
        patterns = torch.cartesian_prod(*[torch.arange(-1, 2)] * size)
        return torch.cat([patterns, patterns[:4] * 3])
    signs = torch.randint(-1, 2, (8, size), generator=generator)
    return torch.cat([patterns, patterns[:4] * 3, signs, signs << 32])


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
