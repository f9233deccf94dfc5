"""The eager reference as a provider: every format, every device, no speed."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from inductor_q.decode.eager import Eager
from inductor_q.formats import QuantFormat
from inductor_q.kernels.calls import Dequantize
from inductor_q.kernels.provider import REFERENCE, DequantizeProvider, Launch

ROWS_AT_ONCE_NUMEL = 1 << 22  # elements decoded at a time: the int64 indices are 32 MiB


class Reference(DequantizeProvider):
    name = REFERENCE

    def prepare(self, call: Dequantize) -> Launch:
        return functools.partial(_decode, call.fmt)


def _decode(fmt: QuantFormat, operands: Sequence[Tensor], out: Tensor) -> None:
    named = dict(zip(fmt.operands, operands, strict=True))
    unit = getattr(torch, fmt.packing.unit)
    named["qweight"] = named["qweight"].reshape(-1).view(unit)  # from any storage dtype
    cols = out.shape[-1]
    interpreter = Eager(named, cols, out.shape[0])
    step = max(1, ROWS_AT_ONCE_NUMEL // max(1, cols))
    rows = out.reshape(-1, cols) if out.is_contiguous() else out
    for start in range(0, rows.shape[0], step):
        part = rows[start : start + step]
        index = torch.arange(part.numel(), device=out.device) + start * cols
        part.copy_(fmt.decode(interpreter, index).reshape(part.shape))


KERNEL = Reference()
