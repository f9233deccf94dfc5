"""`qfuse::accumulate` in Inductor: the product is added into the buffer that the matrix lies in.

Only into memory that nobody else reads: the result of a kernel in a buffer of its own, used once.
Everything else becomes `addmm`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx
from torch._inductor import ir, lowering
from torch._inductor.virtualized import V

aten = torch.ops.aten


def register() -> None:
    lowering.register_lowering(torch.ops.qfuse.accumulate.default, type_promotion_kind=None)(lower)


def lower(out: ir.TensorBox, a: Any, b: Any) -> Any:
    if not _is_ours(out):
        return lowering.lowerings[aten.addmm.default](out, a, b)
    buffer: Any = out
    buffer.freeze_layout()  # a concatenation may not move it any more
    ir.FallbackKernel.create(aten.addmm_.default, out, a, b)
    return out


def _is_ours(out: ir.TensorBox) -> bool:
    box, node = out.data, V.graph.current_node
    if not isinstance(box, ir.StorageBox) or len(cast(fx.Node, node.args[0]).users) != 1:
        return False
    kernel = box.data
    if isinstance(kernel, ir.MultiOutput):  # of an op that allocates its result
        return not kernel.get_inputs_that_alias_output()
    return type(kernel) is ir.ExternKernelOut
