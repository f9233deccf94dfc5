"""Lower `qfuse::materialize` to a buffer, and `qfuse::materialize_all` to buffers of one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch._inductor import ir, lowering
from torch._inductor.codegen.common import BackendFeature
from torch._inductor.virtualized import V


def register() -> None:
    lower = lowering.register_lowering(
        torch.ops.qfuse.materialize.default, type_promotion_kind=None
    )
    lower(lower_materialize)
    lower = lowering.register_lowering(
        torch.ops.qfuse.materialize_all.default, type_promotion_kind=None
    )
    lower(lower_materialize_all)


def lower_materialize(x: Any) -> ir.TensorBox:
    """Return a buffer whose strides are exactly a contiguous tensor's: Inductor may not pad them,
    nor choose the stride of a dimension of size one. Whatever else needs `x` in memory, in this
    shape or in another, reads that buffer too."""
    is_whole = isinstance(x.data, (ir.StorageBox, ir.View)) and not isinstance(x.data, ir.SliceView)
    if is_whole:
        x.realize()  # else it would be copied, and computed again for those
    strides = ir.FlexibleLayout.contiguous_strides(x.get_size())
    return cast(ir.TensorBox, ir.ExternKernel.require_exact_strides(x, strides))


def lower_materialize_all(xs: Sequence[Any]) -> list[ir.TensorBox]:
    """Return buffers with the strides that were traced, made by what Inductor calls a list of
    operations: one kernel, for devices whose code has such."""
    traced = V.graph.current_node.meta["val"]
    buffers, names = [], []
    for x, value in zip(xs, traced, strict=True):
        # What another reader has in memory already is an operation of its own.
        is_new = isinstance(x.data, ir.StorageBox) and isinstance(x.data.data, ir.Pointwise)
        x.realize()
        buffers.append(ir.ExternKernel.require_exact_strides(x, value.stride()))
        if is_new:
            names.append(x.get_operation_name())
    if len(names) > 1 and V.graph.has_feature(xs[0].get_device(), BackendFeature.FOREACH):
        V.graph.register_operation_list(names)
    return cast(list[ir.TensorBox], buffers)
