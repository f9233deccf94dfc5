"""Causal masks of a model's inputs: which keys are valid, and which positions begin a document."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.attention import causal
from tests.support.masks import (
    OTHERWISE,
    documents,
    documents_by_place,
    in_window_of_sixteen,
    meaning,
    same,
    same_in_window,
    same_number,
    valid_keys,
)


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


def test_masks_of_an_input_that_is_written_to() -> None:
    def cleared(x: Tensor) -> Tensor:
        mask = valid_keys(x)
        x[:, 0] = 0
        return mask

    found = meaning(cleared, torch.ones(2, 48, dtype=torch.int64), dynamic=False)
    assert found == "the mask, or what it is made of, is written to by setitem"


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
