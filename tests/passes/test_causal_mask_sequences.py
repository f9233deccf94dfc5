"""Causal masks within sequences that an input numbers, as packed batches have them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.attention import causal, positions
from tests.support.masks import (
    OTHERWISE,
    mapped,
    meaning,
    same,
    same_and_real,
    same_in_window,
    same_number,
)


def same_of_three_dimensions(x: Tensor) -> Tensor:
    """As a collator would make it: [B, S, S], with a dimension for heads at the end."""
    n = x.shape[1]
    triangle = torch.tril(torch.ones(n, n, dtype=torch.bool, device=x.device))
    return ((x.unsqueeze(-1) == x.unsqueeze(-2)) & triangle).unsqueeze(1)


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
