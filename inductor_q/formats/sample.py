"""Random operands: what a test or a benchmark decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inductor_q.formats.operand import FLOATS, Operand

if TYPE_CHECKING:
    from torch import Generator, Tensor


def random_operand(operand: Operand, generator: Generator) -> Tensor:
    """Fill an operand with any codes, or with numbers from 1/32 to 3/32 if it holds numbers."""
    import torch

    dtype = getattr(torch, operand.dtypes[0] if operand.dtypes else "uint8")
    if operand.dtypes and operand.dtypes[0] in FLOATS:
        return (torch.rand(operand.numel, generator=generator) + 0.5).to(dtype) / 16
    limits = torch.iinfo(dtype)
    codes = torch.randint(limits.min, limits.max + 1, (operand.numel,), generator=generator)
    return codes.to(dtype)
