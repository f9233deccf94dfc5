"""Functions that generated code calls by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from inductor_q.formats import FORMATS
from inductor_q.ops.dequantize import write
from inductor_q.ops.grouped_gram import GroupedGram
from inductor_q.ops.grouped_gram import run as run_gram
from inductor_q.ops.scatter2scatter import run, unchecked
from inductor_q.ops.tile_map import run as run_tile_map


def qfuse_dequantize(
    operands: Sequence[Tensor], format: str, provider: str, *, out: Tensor
) -> None:
    """Write a weight's values into `out`, a matrix or a slice of a wider one."""
    write(operands, FORMATS[format], out, provider)


def qfuse_scatter2scatter(*args: Any) -> tuple[Tensor, Tensor]:
    """The op with its arguments as traced: checked then."""
    *inputs, provider = args
    return run(unchecked(inputs), provider)


def qfuse_grouped_gram(*args: Any) -> Tensor:
    """The op with its arguments as traced: checked then."""
    return run_gram(GroupedGram(*args))


def qfuse_tile_map(offsets: Tensor, rows: int) -> Tensor:
    """The op with its arguments as traced: checked then."""
    return run_tile_map(offsets, rows)
