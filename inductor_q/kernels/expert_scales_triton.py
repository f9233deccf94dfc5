"""Write out the scales of packed experts as the expert GEMMs read them, with one Triton launch.

A format may find a scale by way of several tensors, and has those of a row next to each other. The
GEMMs want one number for each group of neighbours, and those of consecutive rows next to each
other. What finds a scale is printed from the format (`inductor_q.decode.triton`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from inductor_q.decode.triton import device_functions
from inductor_q.formats import QuantFormat
from inductor_q.kernels.dequantize_triton import INT32_LIMIT, compile_source
from inductor_q.kernels.expert_calls import Scatter2Scatter
from inductor_q.kernels.triton_launch import Repeated

#: The fastest of 33 tiles and numbers of warps on an H200, for nf4, mxfp4 and nvfp4.
ROWS, GROUPS, WARPS = 32, 32, 4

_KERNEL = """
@triton.jit
def expand_scales(out, offsets, {pointers}rows, columns, groups, GROUP: tl.constexpr,
                  ROWS: tl.constexpr, GROUPS: tl.constexpr, FACTOR: tl.constexpr,
                  PAIRS: tl.constexpr, WIDE: tl.constexpr):
    expert = tl.program_id(2)
    if WIDE:
        expert = expert.to(tl.int64)
    if tl.load(offsets + expert) < tl.load(offsets + expert + 1):
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[None, :]
        mask = (row < rows) & (group < groups)
        found = scale_fn((expert * rows + row) * columns + group * GROUP, mask, {operands})
        found = found * FACTOR
        if PAIRS:  # the value in bfloat16 in the low half, what is missing of it in the high one
            high = found.to(tl.bfloat16)
            low = (found - high.to(tl.float32)).to(tl.bfloat16)
            high = high.to(tl.uint16, bitcast=True).to(tl.uint32)
            found = high | (low.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
        tl.store(out + (expert * groups + group) * rows + row, found, mask=mask)
"""


def group_of(fmt: QuantFormat, columns: int) -> int:
    """Return how many neighbours in a row of `columns` share a scale, as a power of two."""
    group = fmt.group(columns)
    return group & -group


class ExpandScales:
    """Returns the scales of all calls of a kind, times a factor: [E, columns / group, rows].

    Experts without rows have anything.

    Args:
        call: one of them.
        group: elements of a row that share a scale, or a part of them.
        pairs: return int32, each of them two bfloat16 whose sum is the scale; else float32.
    """

    def __init__(
        self, call: Scatter2Scatter, group: int, factor: float, *, pairs: bool = False
    ) -> None:
        assert call.fmt is not None
        e, rows, columns = call.shape
        groups = columns // group
        self._dtype = torch.int32 if pairs else torch.float32
        self._shape = (e, groups, rows)
        function, names = kernel(call.fmt)
        self._operands = [call.fmt.operands.index(name) for name in names]
        constants = {"GROUP": group, "ROWS": ROWS, "GROUPS": GROUPS, "FACTOR": factor}
        self._launch = Repeated(
            function,
            (-(-rows // ROWS), -(-groups // GROUPS), e),
            (rows, columns, groups),
            {**constants, "PAIRS": pairs, "WIDE": e * (rows + ROWS) * columns >= INT32_LIMIT},
            num_warps=WARPS,
        )

    def __call__(self, call: Scatter2Scatter) -> Tensor:
        out = torch.empty(self._shape, dtype=self._dtype, device=call.x.device)
        operands = [call.operands[i] for i in self._operands]
        self._launch([out, call.offsets.contiguous(), *operands])
        return out


@functools.cache
def kernel(fmt: QuantFormat) -> tuple[Any, tuple[str, ...]]:
    """Print and compile the kernel of a format; return it, and the operands it takes."""
    device = device_functions(fmt)
    assert "rows" not in device.sizes, f"{fmt.name=}"  # those of a stack of weights
    source = device.source + _KERNEL.format(
        pointers="".join(f"{name}, " for name in device.scale_operands),
        operands=", ".join((*device.scale_operands, *device.sizes)),
    )
    function = compile_source(f"<qfuse scales of experts {fmt.name}>", source, "expand_scales")
    return function, device.scale_operands
