"""What a kernel is: one provider of one op, which says when it cannot serve and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from inductor_q.formats import QuantFormat


class DequantizeKernel(Protocol):
    """Writes a weight's values into `out` (any row stride, unit column stride)."""

    name: str

    def available(self) -> str:
        """Empty when this machine can run the kernel, else the reason why not."""
        ...

    def decodes(self, fmt: QuantFormat) -> str:
        """Empty when this kernel knows the format, else the reason why not."""
        ...

    def supports(self, operands: Sequence[Tensor], fmt: QuantFormat, out: Tensor) -> str:
        """Empty when this kernel can serve the call, else the reason why not."""
        ...

    def launch(self, operands: Sequence[Tensor], fmt: QuantFormat, out: Tensor) -> None: ...


class QuantizeKbitKernel(Protocol):
    """Computes `qfuse::quantize_kbit`, bit for bit as `ops.quantize_kbit.reference`."""

    name: str

    def available(self) -> str:
        """Empty when this machine can run the kernel, else the reason why not."""
        ...

    def supports(self, x: Tensor, codebook: Tensor, k: int, absmax: str) -> str:
        """Empty when this kernel can serve the call, else the reason why not."""
        ...

    def launch(self, x: Tensor, codebook: Tensor, k: int, absmax: str) -> tuple[Tensor, Tensor]: ...
