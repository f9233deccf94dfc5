"""Causal masks that vmap makes of a function of four numbers, as transformers 4 does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.attention import causal
from tests.support.masks import OTHERWISE, mapped, meaning


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
