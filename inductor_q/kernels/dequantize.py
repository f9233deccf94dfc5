"""Dequantize with the first provider of the device's list that does not refuse the call.

The launch that a provider prepares for a call is kept for all calls that are like it, so that each
costs the host little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inductor_q.formats import QuantFormat
from inductor_q.kernels import (
    dequantize_cpp,
    dequantize_cuda,
    dequantize_reference,
    dequantize_triton,
)
from inductor_q.kernels.calls import Dequantize, aligned
from inductor_q.kernels.checks import check_operands
from inductor_q.kernels.provider import (
    REFERENCE,
    Launch,
    Table,
    not_listed,
    on_device,
    select,
)

DEQUANTIZE: Table = {
    "cpu": (dequantize_cpp.KERNEL, dequantize_reference.KERNEL),
    "cuda": (dequantize_cuda.KERNEL, dequantize_triton.KERNEL, dequantize_reference.KERNEL),
}

#: The provider of compiled code that is no kernel: Inductor's own loops, fused with their
#: neighbours.
POINTWISE = "inductor"

#: How many kinds of calls are remembered: many models' weights. Beyond that all are forgotten, and
#: come back.
KEPT = 4096


class Prepared:
    """Launches of the providers of `table`, each prepared at the first call of a kind.

    A launch serves all calls of its kind: those that `DequantizeProvider` counts as like the first.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self.launches: dict[tuple[Any, ...], Launch] = {}
        self.checked: set[tuple[Any, ...]] = set()

    def check(
        self, operands: Sequence[Tensor], fmt: QuantFormat, shape: Sequence[int], dtype: torch.dtype
    ) -> None:
        """Check the operands of real tensors, but not again where operands like these passed."""
        key = (fmt, tuple(shape), dtype, *[(t.dtype, t.numel(), t.device) for t in operands])
        if key not in self.checked:
            check_operands(operands, fmt, shape, dtype)
            if len(self.checked) >= KEPT:
                self.checked.clear()
            self.checked.add(key)

    def write(
        self,
        operands: Sequence[Tensor],
        fmt: QuantFormat,
        out: Tensor,
        wanted: str = "auto",
        kind: str = "",
    ) -> None:
        """Write the values of a weight into the matrix `out`, by `wanted` if it can.

        kind: what generated code knows of all calls like this one, as `dispatch.serve_kind` has it.
        """
        key: tuple[Any, ...] = (kind, out.get_device())
        if not kind or not aligned(out, *operands):
            key = (
                *(fmt, wanted, out.device, out.dtype, out.shape, out.stride(), out.data_ptr() % 16),
                *[(t.dtype, t.is_contiguous(), t.data_ptr() % 16) for t in operands],
            )
        launch = self.launches.get(key)
        if launch is None:
            if len(self.launches) >= KEPT:
                self.launches.clear()
            call = Dequantize(operands, fmt, out)
            launch = self.launches[key] = self._prepare(call, wanted)
        launch(operands, out)

    def _prepare(self, call: Dequantize, wanted: str) -> Launch:
        if call.out.numel() == 0:
            return _nothing
        provider: Any = select("dequantize", self.table, call, wanted)
        launch: Launch = provider.prepare(call)
        return launch


def _nothing(operands: Sequence[Tensor], out: Tensor) -> None:
    """Launch nothing, for a weight without elements."""


PREPARED = Prepared(DEQUANTIZE)
write = PREPARED.write


def not_callable(shape: Sequence[int] | None, cpp_wrapper: bool) -> str:
    """Return why compiled code calls no kernel for a weight of `shape`; empty where it does."""
    if cpp_wrapper:
        return "C++ wrapper code calls no Python function"
    if shape is not None and len(shape) != 2:
        return f"kernels write matrices, and the weight has {len(shape)} dimensions"
    return ""


def compiled_by(
    device_type: str, wanted: str = "auto", fmt: QuantFormat | None = None, barred: str = ""
) -> str:
    """Name who dequantizes in compiled code: `wanted` where it can, else the fastest that can.

    Without `fmt`, only what this machine lacks counts. `barred` is the answer of `not_callable`.
    """
    if wanted == POINTWISE or not (barred or refusal(device_type, wanted, fmt)):
        return wanted
    names = () if barred else kernels_of(device_type)
    return next((n for n in names if not refusal(device_type, n, fmt)), POINTWISE)


def refusal(device_type: str, name: str, fmt: QuantFormat | None = None) -> str:
    """Return why the provider of that name cannot dequantize here; empty where it can.

    Without `fmt`, only what this machine lacks counts.
    """
    for provider in on_device(DEQUANTIZE, device_type):
        if provider.name == name:
            return provider.missing() or (provider.unknown(fmt) if fmt is not None else "")
    return not_listed(device_type)


def kernels_of(device_type: str) -> list[str]:
    """List the names of the providers that can run on this machine, without the reference."""
    listed = on_device(DEQUANTIZE, device_type)
    return [p.name for p in listed if p.name != REFERENCE and not p.missing()]
