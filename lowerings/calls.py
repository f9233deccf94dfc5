"""Functions that generated code calls by name."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from inductor_q.formats import FORMATS
from inductor_q.ops.dequantize import write


def qfuse_dequantize(
    operands: Sequence[Tensor], format: str, provider: str, *, out: Tensor
) -> None:
    """Write a weight's values into `out`, a matrix or a slice of a wider one."""
    write(operands, FORMATS[format], out, provider)
