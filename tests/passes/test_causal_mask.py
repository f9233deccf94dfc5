"""Which masks are known to be causal, and why any other is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from inductor_q.passes.causal_attention import CausalAttention
from inductor_q.passes.causal_mask import MADE_OUTSIDE, Unproven, read
from inductor_q.passes.dynamo_graph import CHECKPOINT
from inductor_q.passes.mask_meaning import Meaning
from tests.support.attention import captured, causal, positions

LARGE = "the mask is computed with sums or copies as large as a window may be"


def result(graph: fx.Graph) -> fx.Node:
    """What a graph with one result returns."""
    (found,) = graph.output_node().all_input_nodes
    return found


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


def meaning(mask: Callable[..., Tensor], *inputs: Tensor, dynamic: bool) -> str:
    """What a mask of inputs is proven to mean; or why it is not known."""
    graph = captured(mask, *inputs, dynamic=dynamic).graph
    found = read(result(graph), {}, [graph])
    if isinstance(found, Unproven):
        return found.reason
    parts = []
    for part in ("valid", "positions", "sequences"):
        source = getattr(found, part)
        if source is not None:
            assert source.op == "placeholder"
            parts.append(f"{part} {str(source.target)[2:3]}")
    parts += [found.is_valid] if found.valid is not None and found.is_valid != "!= 0" else []
    parts += [found.real] if found.real else []
    return ", ".join(parts + ([] if found.window is None else [f"window {found.window}"]))


def valid_keys(x: Tensor) -> Tensor:
    """As transformers writes it."""
    q, k = positions(x)
    sequence = torch.arange(x.shape[0])[:, None, None, None]
    return (k <= q) & x.to(dtype=torch.bool)[sequence, k]


def documents(x: Tensor) -> Tensor:
    """As transformers 5 writes it: by numbers of sequences, and not after the query's position."""
    first = x[:, :1] - 1
    number = (torch.diff(x, prepend=first, dim=-1) != 1).cumsum(-1)
    same = number[:, None, :, None] == number[:, None, None, :]
    return same & (x[:, None, None, :] <= x[:, None, :, None])


def documents_by_place(x: Tensor) -> Tensor:
    first = x[:, :1] - 1
    number = (torch.diff(x, prepend=first, dim=-1) != 1).cumsum(-1)
    return causal(x) & (number[:, None, :, None] == number[:, None, None, :])


def valid_queries(x: Tensor) -> Tensor:
    return causal(x) & (x != 0)[:, None, :, None]


def hidden_keys(x: Tensor) -> Tensor:
    return causal(x) & (x == 0)[:, None, None, :]


def positive_keys(x: Tensor) -> Tensor:
    """As who pads with -1 writes it, or with -100 as labels are."""
    return causal(x) & (x > 0)[:, None, None, :]


def keys_from_one_on(x: Tensor) -> Tensor:
    return causal(x) & ~(x < 1)[:, None, None, :]


def keys_of_32_bits(x: Tensor) -> Tensor:
    return causal(x) & (x.int() != 0)[:, None, None, :]


def keys_of_one(x: Tensor) -> Tensor:
    """Twos are valid in eager, and not here."""
    return causal(x) & (x == 1)[:, None, None, :]


def documents_unordered(x: Tensor) -> Tensor:
    number = (torch.diff(x, prepend=x[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return (number[:, None, :, None] == number[:, None, None, :]).expand(-1, 1, -1, -1)


def documents_of_any_step(x: Tensor) -> Tensor:
    """A new document only where positions fall."""
    number = (torch.diff(x, prepend=x[:, :1], dim=-1) < 0).cumsum(-1)
    return causal(x) & (number[:, None, :, None] == number[:, None, None, :])


OTHERWISE = "the mask depends on the input x in a way that is not known"


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (valid_keys, "valid x"),
        (documents, "positions x"),
        (documents_by_place, "positions x"),
        (valid_queries, OTHERWISE),
        (hidden_keys, OTHERWISE),
        (positive_keys, "valid x, > 0"),
        (keys_from_one_on, "valid x, > 0"),
        (keys_of_32_bits, OTHERWISE),
        (keys_of_one, OTHERWISE),
        (documents_unordered, OTHERWISE),
        (documents_of_any_step, OTHERWISE),
    ],
)
def test_masks_of_one_input(mask: Callable[[Tensor], Tensor], expected: str, dynamic: bool) -> None:
    assert meaning(mask, torch.ones(2, 48, dtype=torch.int64), dynamic=dynamic) == expected


def same(x: Tensor) -> Tensor:
    return x[:, None, :, None] == x[:, None, None, :]


def same_number(x: Tensor) -> Tensor:
    return causal(x) & same(x)


def same_of_three_dimensions(x: Tensor) -> Tensor:
    """As a collator would make it: [B, S, S], with a dimension for heads at the end."""
    n = x.shape[1]
    triangle = torch.tril(torch.ones(n, n, dtype=torch.bool, device=x.device))
    return ((x.unsqueeze(-1) == x.unsqueeze(-2)) & triangle).unsqueeze(1)


def same_and_real(x: Tensor) -> Tensor:
    return same_number(x) & (x != 0)[:, None, None, :]


def same_and_real_queries(x: Tensor) -> Tensor:
    """As transformers 4 made a block mask of an attention_mask for FlexAttention."""
    return same_number(x) & (x > 0)[:, None, :, None]


def same_and_no_less(x: Tensor) -> Tensor:
    """As transformers' blockwise_overlay tells what is of no block."""
    return same_number(x) & (x >= 0)[:, None, :, None]


def same_and_not_the_last(x: Tensor) -> Tensor:
    return same_number(x) & x.ne(-1)[:, None, None, :]


def multiplied(x: Tensor) -> Tensor:
    """As axolotl's mask_2d_to_4d computes: products of numbers that are 0 and 1, in float32."""
    n = x.shape[1]
    whole = x.unsqueeze(1).unsqueeze(2).expand(x.shape[0], 1, n, n)
    one, zero = (torch.tensor(i, device=x.device).to(torch.float32) for i in (1, 0))
    real = torch.where(whole != 0, one, zero)
    kept = torch.eq(whole, whole.transpose(-1, -2)).int() * real
    triangle = torch.tril(torch.ones((n, n), dtype=torch.float32)).to(x.device)
    return (kept * triangle).bool()


def filled(x: Tensor) -> Tensor:
    return causal(x).masked_fill(~same(x), False)


def products_of_numbers(x: Tensor) -> Tensor:
    return causal(x) & (x[:, None, :, None] * x[:, None, None, :] > 0)


def halves_of_numbers(x: Tensor) -> Tensor:
    """Numbers that are the same in eight bits."""
    return same_number(x.to(torch.int8))


def number_by_changes(x: Tensor) -> Tensor:
    """A number that comes again begins another sequence."""
    return same_number((torch.diff(x, prepend=x[:, :1], dim=-1) != 0).cumsum(-1))


def numbers_up_to_the_length(x: Tensor) -> Tensor:
    return same_number(x) & (x <= x.shape[1])[:, None, None, :]


def no_larger_number(x: Tensor) -> Tensor:
    return causal(x) & (x[:, None, None, :] <= x[:, None, :, None])


def first_number_too(x: Tensor) -> Tensor:
    return causal(x) & (same(x) | (x == 0)[:, None, None, :])


def same_or_itself(x: Tensor) -> Tensor:
    """So that no row is empty."""
    q, k = positions(x)
    return same_and_real(x) | (q == k)


def same_unordered(x: Tensor) -> Tensor:
    return same(x)


def same_in_window(x: Tensor) -> Tensor:
    return same_and_real(x) & in_window_of_sixteen(x)


def near_numbers(x: Tensor) -> Tensor:
    return causal(x) & (x[:, None, None, :] > x[:, None, :, None] - 16) & same(x)


def mapped_sequences(x: Tensor) -> Tensor:
    """As transformers makes it of `and_masks`: by a function of four numbers."""

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = q.new_ones((), dtype=torch.bool) & (k <= q) & (x[b, q] == x[b, k])
        return q.new_zeros((), dtype=torch.bool) | seen

    return mapped(x, sees)


def mapped_multipack(x: Tensor) -> Tensor:
    return mapped(x, lambda b, h, q, k: (k <= q) & (x[b, q] == x[b, k]) & (x[b, k] != 0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (same_number, "sequences x"),
        (same_of_three_dimensions, "sequences x"),
        (filled, "sequences x"),
        (same_and_real, "sequences x, != 0"),
        (same_and_real_queries, "sequences x, > 0"),
        (same_and_no_less, "sequences x, >= 0"),
        (same_and_not_the_last, "sequences x, != -1"),
        (multiplied, "sequences x, != 0"),
        (same_in_window, "sequences x, != 0, window 16"),
        (mapped_sequences, "sequences x"),
        (mapped_multipack, "sequences x, != 0"),
        (products_of_numbers, "the mask is computed with a product of numbers"),
        (halves_of_numbers, "the mask is computed in torch.int8"),
        (number_by_changes, OTHERWISE),
        (numbers_up_to_the_length, OTHERWISE),
        (no_larger_number, OTHERWISE),
        (first_number_too, OTHERWISE),
        (same_or_itself, OTHERWISE),
        (same_unordered, OTHERWISE),
        (near_numbers, "the mask is computed with the number 16, as a window is"),
    ],
)
def test_masks_of_sequences(
    mask: Callable[[Tensor], Tensor], expected: str, dynamic: bool, dtype: torch.dtype
) -> None:
    found = meaning(mask, torch.ones(2, 49, dtype=dtype), dynamic=dynamic)
    assert found.startswith(expected) if expected.startswith("the") else found == expected


def test_numbers_that_32_bits_do_not_hold() -> None:
    found = meaning(lambda x: same_number(x.int()), torch.ones(2, 49).long(), dynamic=False)
    assert found == OTHERWISE


def test_a_mask_that_is_given() -> None:
    def given(mask: Tensor) -> Tensor:
        return mask

    for dtype in (torch.bool, torch.float32):
        mask = torch.ones(2, 1, 8, 8, dtype=dtype)
        assert reason(given, mask) == MADE_OUTSIDE


def test_masks_of_an_input_that_is_written_to() -> None:
    def cleared(x: Tensor) -> Tensor:
        mask = valid_keys(x)
        x[:, 0] = 0
        return mask

    found = meaning(cleared, torch.ones(2, 48, dtype=torch.int64), dynamic=False)
    assert found == "the mask, or what it is made of, is written to by setitem"


def in_window(x: Tensor) -> Tensor:
    """As transformers writes it."""
    q, k = positions(x)
    return ((k > q - 4000) & (k <= q)).expand(x.shape[0], 1, -1, -1)


def in_window_of_one(x: Tensor) -> Tensor:
    q, k = positions(x)
    return causal(x) & (k > q - 1)


def in_window_of_three(x: Tensor) -> Tensor:
    q, k = positions(x)
    return causal(x) & (q - k < 3)


def in_window_of_sixteen(x: Tensor) -> Tensor:
    q, k = positions(x)
    return causal(x) & (k > q - 16)


def valid_in_window(x: Tensor) -> Tensor:
    return valid_keys(x) & in_window_of_sixteen(x)


def documents_in_window(x: Tensor) -> Tensor:
    """As transformers 5 writes it: the distance is one of `position_ids`."""
    return documents(x) & (x[:, None, None, :] > x[:, None, :, None] - 48)


def documents_in_window_by_place(x: Tensor) -> Tensor:
    return documents_by_place(x) & in_window_of_sixteen(x)


def one_further(x: Tensor) -> Tensor:
    q, k = positions(x)
    return (k <= q) & (k >= q - 16)


def twice_as_far(x: Tensor) -> Tensor:
    q, k = positions(x)
    return (k <= q) & (k > q - 16 - 16)


def of_two_windows(x: Tensor) -> Tensor:
    q, k = positions(x)
    return in_window_of_sixteen(x) & (k > q - 17)


def first_and_near(x: Tensor) -> Tensor:
    """The first positions stay in sight, as attention sinks do."""
    q, k = positions(x)
    return in_window_of_sixteen(x) | ((k < 16) & (k <= q))


def ahead(x: Tensor) -> Tensor:
    q, k = positions(x)
    return (k > q - 16) & (k < q + 16)


def positions_in_window(x: Tensor) -> Tensor:
    """Documents see each other where their positions are near."""
    return causal(x) & (x[:, None, None, :] > x[:, None, :, None] - 16)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (in_window, "window 4000"),
        (in_window_of_one, "the mask is another than the causal one"),
        (in_window_of_three, "window 3"),
        (valid_in_window, "valid x, window 16"),
        (documents_in_window, "positions x, window 48"),
        (documents_in_window_by_place, "positions x, window 16"),
        (one_further, "the mask is computed with the number 16, as a window is"),
        (twice_as_far, "the mask is computed with the number 16, as a window is"),
        (of_two_windows, "the mask is computed with the number 17, as a window is"),
        (first_and_near, "the mask is computed with the number 16, as a window is"),
        (ahead, "the mask is computed with the number 16, as a window is"),
        (positions_in_window, "the mask is computed with the number 16, as a window is"),
    ],
)
def test_masks_of_a_window(mask: Callable[[Tensor], Tensor], expected: str, dynamic: bool) -> None:
    assert meaning(mask, torch.ones(2, 49, dtype=torch.int64), dynamic=dynamic) == expected


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_window_as_long_as_the_sequence(dynamic: bool) -> None:
    """Of that one length it is the causal mask; of any length it is a window."""
    found = meaning(in_window, torch.ones(2, 4000, dtype=torch.int64), dynamic=dynamic)
    assert found == ("window 4000" if dynamic else "")


def mapped(x: Tensor, sees: Callable[..., Tensor]) -> Tensor:
    """As transformers 4 writes it: a function of four numbers, mapped over all of them."""
    for dims in (
        (None, None, None, 0),
        (None, None, 0, None),
        (None, 0, None, None),
        (0,) + (None,) * 3,
    ):
        sees = torch.vmap(sees, in_dims=dims, out_dims=0)
    at, keys = torch.arange(0, x.shape[1]), torch.arange(x.shape[1])
    keys += 0
    with TransformGetItemToIndex():
        return sees(torch.arange(x.shape[0]), torch.arange(1), at, keys)


def mapped_valid(x: Tensor) -> Tensor:
    valid = x.to(torch.bool)
    return mapped(x, lambda b, h, q, k: q.new_ones((), dtype=torch.bool) & (k <= q) & valid[b, k])


def mapped_window(x: Tensor) -> Tensor:
    return mapped(x, lambda b, h, q, k: (k > q - 16) & (k <= q))


def mapped_documents(x: Tensor) -> Tensor:
    number = (torch.diff(x, prepend=x[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return mapped(x, lambda b, h, q, k: (k <= q) & (number[b, q] == number[b, k]))


def mapped_queries(x: Tensor) -> Tensor:
    return mapped(x, lambda b, h, q, k: (k <= q) & (x[b, q] != 0))


def mapped_shapes(x: Tensor) -> Tensor:
    """Dimensions are counted otherwise inside of vmap."""
    return mapped(x, lambda b, h, q, k: (k <= q) & (x[b, k].unsqueeze(0).squeeze(0) != 0))


def mapped_to_others(x: Tensor) -> Tensor:
    return torch.vmap(lambda row: causal(row[None])[0], out_dims=0)(x)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (mapped_valid, "valid x"),
        (mapped_window, "window 16"),
        (mapped_documents, "positions x"),
        (mapped_queries, OTHERWISE),
        (mapped_shapes, "the mask is computed with unsqueeze inside of vmap"),
        (mapped_to_others, "the mask "),
    ],
)
def test_masks_by_vmap(mask: Callable[[Tensor], Tensor], expected: str, dynamic: bool) -> None:
    found = meaning(mask, torch.ones(2, 49, dtype=torch.int64), dynamic=dynamic)
    assert found.startswith(expected), found


def of_both(x: Tensor, y: Tensor) -> Tensor:
    return valid_keys(x) & documents(y)


def of_both_in_window(x: Tensor, y: Tensor) -> Tensor:
    return documents(x) & valid_keys(y) & in_window_of_sixteen(x)


def of_valid_queries(x: Tensor, y: Tensor) -> Tensor:
    return of_both(x, y) & (x != 0)[:, None, :, None]


def of_either(x: Tensor, y: Tensor) -> Tensor:
    return causal(x) & ((y != 0) | (x != 0))[:, None, None, :]


def of_sequences(x: Tensor, y: Tensor) -> Tensor:
    return valid_keys(x) & same_number(y)


def of_multipack(x: Tensor, y: Tensor) -> Tensor:
    return valid_keys(y) & same_in_window(x)


def of_two_sequences(x: Tensor, y: Tensor) -> Tensor:
    return same_number(x) & same(y)


def of_sequences_and_positions(x: Tensor, y: Tensor) -> Tensor:
    return same_number(x) & documents(y)


def of_positive_keys(x: Tensor, y: Tensor) -> Tensor:
    return documents(x) & (y > 0)[:, None, None, :]


def of_three(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return of_both(x, y) & valid_keys(z)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (of_both, "valid x, positions y"),
        (of_positive_keys, "valid y, positions x, > 0"),
        (of_both_in_window, "valid y, positions x, window 16"),
        (of_sequences, "valid x, sequences y"),
        (of_multipack, "valid y, sequences x, != 0, window 16"),
        (of_two_sequences, "the mask depends on the inputs y and x in a way that is not known"),
        (
            of_sequences_and_positions,
            "the mask depends on the inputs y and x in a way that is not known",
        ),
        (of_valid_queries, "the mask depends on the inputs x and y in a way that is not known"),
        (of_either, "the mask depends on the inputs x and y in a way that is not known"),
        (of_three, "the mask depends on the input"),
    ],
)
def test_masks_of_more_inputs(mask: Callable[..., Tensor], expected: str, dynamic: bool) -> None:
    count = mask.__code__.co_argcount
    inputs = [torch.ones(2, 49, dtype=torch.int64) + i for i in range(count)]
    assert meaning(mask, *inputs, dynamic=dynamic).startswith(expected)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_positions_of_one_row(dynamic: bool) -> None:
    x, y = torch.ones(2, 49, dtype=torch.int64), torch.ones(1, 49, dtype=torch.int64)
    assert meaning(of_both, x, y, dynamic=dynamic) == "valid x, positions y"
    assert meaning(of_sequences, x, y, dynamic=dynamic) == "valid x, sequences y"


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
