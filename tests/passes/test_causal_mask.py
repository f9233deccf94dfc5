"""Which masks are known to be causal, and why any other is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from inductor_q.passes.causal_attention import CausalAttention
from inductor_q.passes.causal_mask import MADE_OUTSIDE, Unproven, read
from inductor_q.passes.dynamo_graph import CHECKPOINT
from inductor_q.passes.mask_meaning import Meaning
from tests.support.attention import captured, causal, positions
from tests.support.masks import result

LARGE = "the mask is computed with sums or copies as large as a window may be"


def why_not(graph: fx.Graph) -> str:
    """Why what a graph returns is not known to be the causal mask; empty if it is."""
    found = read(result(graph), {}, [graph])
    return found.reason if isinstance(found, Unproven) else "" if found == Meaning() else str(found)


def reason(mask: Callable[..., Tensor], *args: Any, dynamic: bool = False) -> str:
    graph = captured(mask, *args, dynamic=dynamic).graph
    return why_not(graph)


def packed(x: Tensor) -> Tensor:
    """As transformers writes it: causal, and within one sequence of consecutive positions."""
    at = torch.arange(x.shape[1], device=x.device)[None].expand(x.shape[0], -1)
    sequence = (torch.diff(at, prepend=at[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return causal(x) & (sequence[:, None, :, None] == sequence[:, None, None, :])


def lower_triangle(x: Tensor) -> Tensor:
    n = x.shape[1]
    return torch.ones(n, n, dtype=torch.bool).tril().view(1, 1, n, n)


def one_of_four_copies(x: Tensor) -> Tensor:
    """As Qwen3.5 of transformers writes it: positions of text, time, height and width."""
    n = x.shape[1]
    at = torch.arange(n).view(1, 1, -1).expand(4, x.shape[0], -1)[0]
    sequence = (torch.diff(at, prepend=at[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return causal(x) & (sequence[:, None, :, None] == sequence[:, None, None, :])


def beside_what_is_written(x: Tensor) -> Tensor:
    """Angles are computed from the positions, and written to."""
    at = torch.arange(x.shape[1])
    angles = at.float() * 0.5
    angles[None][..., :1] = 0
    return (at <= at[:, None]).expand(x.shape[0], 1, -1, -1)


def of_four_heads(x: Tensor) -> Tensor:
    return causal(x).expand(-1, 4, -1, -1) & torch.ones(1, 4, 1, 1, dtype=torch.bool)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("shape", [(2, 16), (16, 16), (4, 24), (3, 5000)], ids=str)
@pytest.mark.parametrize(
    "mask",
    [
        *(causal, packed, lower_triangle),
        *(one_of_four_copies, beside_what_is_written, of_four_heads),
    ],
)
def test_causal_masks_are_known(
    mask: Callable[[Tensor], Tensor], shape: tuple[int, int], dynamic: bool
) -> None:
    assert reason(mask, torch.zeros(shape), dynamic=dynamic) == ""


def strictly_causal(x: Tensor) -> Tensor:
    q, k = positions(x)
    return k < q


def anti_causal(x: Tensor) -> Tensor:
    q, k = positions(x)
    return k >= q


def everything(x: Tensor) -> Tensor:
    q, k = positions(x)
    return (k <= q) | (k > q)


def prefix(x: Tensor) -> Tensor:
    q, k = positions(x)
    return (k <= q) | (k < 64)


def halves(x: Tensor) -> Tensor:
    q, k = positions(x)
    half = x.shape[1] // 2
    return (k <= q) & ((k < half) == (q < half))


def longer(x: Tensor) -> Tensor:
    q, _ = positions(x)
    return torch.arange(x.shape[1] + 1)[None, None, None, :] <= q


def additive(x: Tensor) -> Tensor:
    return torch.zeros(1, 1, x.shape[1], x.shape[1])


def padded(x: Tensor) -> Tensor:
    return causal(x) & (x != 0)[:, None, None, :]


def in_bytes(x: Tensor) -> Tensor:
    q, k = positions(x)
    return (k.to(torch.int8) <= q.to(torch.int8)).expand(2, 1, -1, -1)


def cleared(x: Tensor) -> Tensor:
    mask = causal(x).clone()
    mask[0, :, :, :3] = False
    return mask


def cleared_through_a_view(x: Tensor) -> Tensor:
    mask = causal(x).clone()
    mask[0].squeeze(0).fill_(False)
    return mask


def with_positions_written(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1]) + 0
    at[None][..., :1] = 5
    return (at <= at[:, None]).expand(x.shape[0], 1, -1, -1)


def narrowed(x: Tensor) -> Tensor:
    mask = causal(x).clone()
    mask &= (x != 0)[:, None, None, :]
    return mask


@torch.library.custom_op("qfuse_test::clear", mutates_args=("mask",))
def clear(mask: Tensor) -> None:
    mask.zero_()


def cleared_by_an_operator(x: Tensor) -> Tensor:
    mask = causal(x).clone()
    torch.ops.qfuse_test.clear(mask)
    return mask


def cleared_in_a_list(x: Tensor) -> Tensor:
    mask = causal(x).clone()
    torch._foreach_zero_([mask])
    return mask


def cleared_by_keyword(x: Tensor) -> Tensor:
    mask = causal(x).clone()
    torch.fill_(input=mask, value=False)
    return mask


def one_more(x: Tensor) -> Tensor:
    """The distance is the number of sequences, which was once taken for any other."""
    q, k = positions(x)
    return (k - q + 1 < 3).expand(3, 1, -1, -1)


def within(x: Tensor, width: Tensor, *, doubled: int = 0) -> Tensor:
    q, k = positions(x)
    for _ in range(doubled):
        width = width + width
    return ((k <= q) & (k > q - width)).expand(x.shape[0], 1, -1, -1)


def one() -> Tensor:
    return torch.ones((), dtype=torch.int64)


def window_of_sums(x: Tensor) -> Tensor:
    return within(x, one(), doubled=4)


def window_of_many_sums(x: Tensor) -> Tensor:
    return within(x, one(), doubled=9)


def window_of_sequences(x: Tensor) -> Tensor:
    """As long as what stands for the sequences is, doubled, more than all positions."""
    return within(x, one().expand(x.shape[0]).cumsum(0)[-1], doubled=6)


def window_of_sums_of_sums(x: Tensor) -> Tensor:
    width = one().expand(x.shape[0])
    for _ in range(9):
        width = width.cumsum(0)
    return within(x, width[-1])


def window_of_copies(x: Tensor) -> Tensor:
    return within(x, one().expand(4).cumsum(0)[-1])


def window_of_many_copies(x: Tensor) -> Tensor:
    return within(x, one().expand(4).cumsum(0)[-1], doubled=6)


def window_of_merged_copies(x: Tensor) -> Tensor:
    return within(x, one().expand(4, 4, 4, 4, 4, 4).reshape(-1).cumsum(0)[-1])


def window_between_copies(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1]).expand(4, -1).cumsum(0)
    return within(x, at[-1][1])


def chunk(x: Tensor, *copies: int) -> Tensor:
    """Keys of the query's chunk, which is as long as there are copies."""
    at = torch.arange(x.shape[1]).view(-1, *(1 for _ in copies)).expand(-1, *copies)
    at = at.reshape(-1)[: x.shape[1]]
    return causal(x) & (at[:, None] == at)


def chunk_of_copies(x: Tensor) -> Tensor:
    return chunk(x, 4)


def chunk_of_many_copies(x: Tensor) -> Tensor:
    return chunk(x, *[4] * 9)


def as_many_copies_as_stand_for_them(x: Tensor) -> Tensor:
    """Up to the query if there were three copies: three is what is put for four, once."""
    q, k = positions(x)
    return (k - q < one().expand(4).cumsum(0)[-1] - 1 - 1).expand(2, 1, -1, -1)


def copies_of_two_numbers(x: Tensor) -> Tensor:
    """Up to the query if the two were one number."""
    q, k = positions(x)
    more = one().expand(6).cumsum(0)[-1] - one().expand(4).cumsum(0)[-1]
    return (k - q < more + 1).expand(2, 1, -1, -1)


def copies_and_heads(x: Tensor) -> Tensor:
    q, k = positions(x)
    more = one().expand(6).cumsum(0)[-1] - one().expand(4).cumsum(0)[-1]
    return (k - q < more + 1).expand(2, 6, -1, -1)


def as_many_ones_as_copies(x: Tensor) -> Tensor:
    """What is let through for `expand` is not, once it is known, for anything else."""
    many = one().expand(4).cumsum(0)[-1] - torch.arange(4)[-1]
    return causal(x) & (many == 1)


def another_copy(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1]).expand(4, -1)[3]
    return causal(x) & (at == at)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (strictly_causal, "the mask is another than the causal one"),
        (anti_causal, "the mask is another than the causal one"),
        (everything, "the mask is another than the causal one"),
        (prefix, "the mask is computed with the number 64, as a window is"),
        (halves, "the mask is computed with the number"),
        (longer, "queries and keys differ in number"),
        (additive, "the mask is not boolean and four-dimensional"),
        (padded, "the mask depends on the input x"),
        (in_bytes, "the mask is computed in torch.int8, which does not hold all positions"),
        (cleared, "the mask, or what it is made of, is written to by setitem"),
        (cleared_through_a_view, "the mask, or what it is made of, is written to by fill_"),
        (with_positions_written, "the mask, or what it is made of, is written to by setitem"),
        (narrowed, "the mask"),
        (cleared_by_an_operator, "the mask, or what it is made of, is written to by clear"),
        (cleared_in_a_list, "the mask, or what it is made of, is written to by _foreach_zero_"),
        (cleared_by_keyword, "the mask, or what it is made of, is written to by fill_"),
        (one_more, "the mask is "),
        (window_of_sums, "the mask is another than the causal one"),
        (window_of_many_sums, LARGE),
        (window_of_sequences, LARGE),
        (window_of_sums_of_sums, LARGE),
        (window_of_copies, "the mask is another than the causal one"),
        (window_of_many_copies, LARGE),
        (window_of_merged_copies, LARGE),
        (window_between_copies, "the mask is another than the causal one"),
        (chunk_of_copies, "the mask is another than the causal one"),
        (chunk_of_many_copies, LARGE),
        (as_many_copies_as_stand_for_them, "the mask is another than the causal one"),
        (copies_of_two_numbers, "the mask is computed with the number"),
        (copies_and_heads, "the mask is computed with the number 4, as a window is"),
        (as_many_ones_as_copies, "the mask is computed with the number 4, as a window is"),
        (another_copy, "the mask is computed with the number 3, as a window is"),
    ],
)
def test_other_masks_are_not(
    mask: Callable[[Tensor], Tensor], expected: str, dynamic: bool
) -> None:
    assert reason(mask, torch.ones(2, 48), dynamic=dynamic).startswith(expected)


def test_a_mask_that_is_given() -> None:
    def given(mask: Tensor) -> Tensor:
        return mask

    for dtype in (torch.bool, torch.float32):
        mask = torch.ones(2, 1, 8, 8, dtype=dtype)
        assert reason(given, mask) == MADE_OUTSIDE


def test_a_function_that_is_not_listed_proves_nothing() -> None:
    def sorted_mask(x: Tensor) -> Tensor:
        return causal(x).float().sort().values.bool()

    assert reason(sorted_mask, torch.ones(2, 8)) == "the mask is computed with sort"


def test_looking_at_a_mask_adds_no_guard() -> None:
    def shifted(x: Tensor) -> Tensor:
        q, k = positions(x)
        return (k <= q + (x.shape[1] - 5)).expand(2, 1, -1, -1)

    graph = captured(shifted, torch.ones(2, 48), dynamic=True).graph
    size = result(graph).meta["example_value"].shape[-1]
    before = len(size.node.shape_env.guards)
    assert why_not(graph).startswith("the mask is computed with")
    assert len(size.node.shape_env.guards) == before


def test_a_body_that_is_called_with_two_masks() -> None:
    """Dynamo gives each call of a checkpoint a body of its own; other writers of graphs may not."""
    attend = torch.nn.functional.scaled_dot_product_attention

    def layer(x: Tensor, mask: Tensor) -> Tensor:
        return attend(x, x, x, attn_mask=mask)

    def twice(x: Tensor) -> Tensor:
        mask, other = causal(x[:, 0]), everything(x[:, 0])
        checkpoint = torch.utils.checkpoint.checkpoint
        x = checkpoint(layer, x, other, use_reentrant=False)
        out: Tensor = checkpoint(layer, x, mask, use_reentrant=False)
        return out

    module = captured(twice, torch.ones(2, 1, 8, 8, requires_grad=True))
    context: Any = None

    def rejected() -> list[str]:
        return [s.rejected for s in CausalAttention().match(module.graph, context)]

    assert rejected() == ["the mask is another than the causal one", ""]
    first, second = (
        n for n in module.graph.nodes if getattr(n.target, "__name__", "") == CHECKPOINT
    )
    second.args = (first.args[0], *second.args[1:])
    assert [bool(reason) for reason in rejected()] == [True]
