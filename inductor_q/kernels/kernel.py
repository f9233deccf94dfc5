"""What a kernel is: one provider of one op, which says when it cannot serve and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from torch import Tensor

from inductor_q.formats import QuantFormat

if TYPE_CHECKING:
    from inductor_q.kernels.calls import GroupedGram, Scatter2Scatter


#: Writes the values of a weight's operands into a matrix, on the current stream.
Launch: TypeAlias = Callable[[Sequence[Tensor], Tensor], None]


class DequantizeKernel(Protocol):
    """Writes a weight's values into `out` (any row stride, unit column stride).

    What `supports` and `prepare` answer holds for every call that is like theirs: of the same
    format, with `out` on the same device and of the same dtype, shape and strides, operands of the
    same dtypes, as contiguous, and all of them as far from a multiple of 16 bytes.
    """

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

    def prepare(self, operands: Sequence[Tensor], fmt: QuantFormat, out: Tensor) -> Launch:
        """What serves the call, which this kernel supports, and all that are like it.

        Finds once what it can, so that a later launch costs the host little. Launches nothing.
        """
        ...

    def launch(self, operands: Sequence[Tensor], fmt: QuantFormat, out: Tensor) -> None:
        """Serve the call by itself."""
        self.prepare(operands, fmt, out)(operands, out)


class QuantizeKbitKernel(Protocol):
    """Computes `qfuse::quantize_kbit`, bit for bit as `quantize_kbit_reference.reference`."""

    name: str

    def available(self) -> str:
        """Empty when this machine can run the kernel, else the reason why not."""
        ...

    def supports(self, x: Tensor, codebook: Tensor, k: int, absmax: str) -> str:
        """Empty when this kernel can serve the call, else the reason why not."""
        ...

    def launch(self, x: Tensor, codebook: Tensor, k: int, absmax: str) -> tuple[Tensor, Tensor]: ...


class Scatter2ScatterKernel(Protocol):
    """Computes `qfuse::scatter2scatter` for at least one row."""

    name: str

    def available(self) -> str:
        """Empty when this machine can run the kernel, else the reason why not."""
        ...

    def decodes(self, fmt: QuantFormat | None) -> str:
        """Empty when this kernel takes weights in the format, None being dense, else the reason."""
        ...

    def supports(self, call: Scatter2Scatter) -> str:
        """Empty when this kernel can serve the call, else the reason why not."""
        ...

    def launch(self, call: Scatter2Scatter) -> tuple[Tensor, Tensor]:
        """The op's two results; contiguous, in the dtype of `call.x`."""
        ...


class GroupedGramKernel(Protocol):
    """Computes `qfuse::grouped_gram` for at least one row."""

    name: str

    def available(self) -> str:
        """Empty when this machine can run the kernel, else the reason why not."""
        ...

    def supports(self, call: GroupedGram) -> str:
        """Empty when this kernel can serve the call, else the reason why not."""
        ...

    def launch(self, call: GroupedGram) -> Tensor: ...


class TileMapKernel(Protocol):
    """Computes `qfuse::tile_map`, as `tile_map.reference` up to the last part."""

    name: str

    def available(self) -> str:
        """Empty when this machine can run the kernel, else the reason why not."""
        ...

    def launch(self, offsets: Tensor, rows: int) -> Tensor: ...
