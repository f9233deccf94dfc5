"""Tell Dynamo that lengths vary, where the training data shows it before the first step.

Dynamo takes the first batch's shape for the only one, and compiles again for the second. A model
whose sequences have different lengths is compiled once where the first batch is marked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sized
from typing import Any, TypeGuard

import torch
from torch import Tensor

#: So many rows of the data are looked at.
_ROWS = 64


def lengths_vary(data: Any) -> bool:
    """Whether rows of ids have different lengths, in a list of rows or a Hugging Face dataset.

    False for other data, of which reading a row may take time or draw random numbers.
    """
    if isinstance(data, list):
        rows = [row for row in data[:_ROWS] if isinstance(row, Mapping)]
        names = {name for row in rows for name in row if str(name).endswith("_ids")}
        columns = [[row.get(name) for row in rows] for name in names]
    elif "datasets" in sys.modules and isinstance(data, sys.modules["datasets"].Dataset):
        if data.format["type"] == "custom":
            return False
        names = {name for name in data.column_names if name.endswith("_ids")}
        columns = [data.select_columns([name])[:_ROWS][name] for name in names]
    else:
        return False
    return any(len({len(row) for row in rows if _is_sequence(row)}) > 1 for rows in columns)


def _is_sequence(row: Any) -> TypeGuard[Sized]:
    """Whether it is numbers in a row, not one of them as `label_ids` may be."""
    return isinstance(row, (list, tuple)) or getattr(row, "ndim", 0) > 0


def mark_lengths(inputs: Mapping[str, Any]) -> None:
    """Mark the length of a model's inputs as one that may change.

    A mark is weak: where the model's code allows only one length, Dynamo compiles for that one.
    Sizes of batches have none, since a batch of one row takes a graph of its own in any case; nor
    have the inputs of a layer that is compiled by itself.
    """
    ids, embedded = inputs.get("input_ids"), inputs.get("inputs_embeds")
    known = ids if isinstance(ids, Tensor) else embedded
    if not isinstance(known, Tensor) or known.ndim < 2:
        return
    length = known.shape[1]
    for tensor in inputs.values():
        if isinstance(tensor, Tensor):
            for dim in _lengths(tensor, length):
                torch._dynamo.maybe_mark_dynamic(tensor, dim)


def _lengths(tensor: Tensor, length: int) -> Iterable[int]:
    """Return which dimensions are lengths: of numbers, the second; of ids and masks, each after the
    first."""
    last = 2 if tensor.is_floating_point() else tensor.ndim
    return [dim for dim in range(1, min(last, tensor.ndim)) if tensor.shape[dim] == length]
