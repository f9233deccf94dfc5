"""Causal masks in a sliding window: how long it is, and what is another mask."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.attention import causal, positions
from tests.support.masks import (
    documents,
    documents_by_place,
    in_window_of_sixteen,
    meaning,
    valid_keys,
)


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
