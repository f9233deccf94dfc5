"""Lower `qfuse::materialize` to a buffer."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch._inductor import ir, lowering


def register() -> None:
    lower = lowering.register_lowering(
        torch.ops.qfuse.materialize.default, type_promotion_kind=None
    )
    lower(lower_materialize)


def lower_materialize(x: Any) -> ir.TensorBox:
    """Return a buffer whose strides are exactly a contiguous tensor's: Inductor may not pad them,
    nor choose the stride of a dimension of size one. Whatever else needs `x` in memory, in this
    shape or in another, reads that buffer too."""
    is_whole = isinstance(x.data, (ir.StorageBox, ir.View)) and not isinstance(x.data, ir.SliceView)
    if is_whole:
        x.realize()  # else it would be copied, and computed again for those
    strides = ir.FlexibleLayout.contiguous_strides(x.get_size())
    return cast(ir.TensorBox, ir.ExternKernel.require_exact_strides(x, strides))
