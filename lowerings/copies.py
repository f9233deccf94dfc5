"""Lower `qfuse::copy_start` and `qfuse::copy_end` to calls of the ops."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir, lowering
from torch._inductor.virtualized import V

START, END = torch.ops.qfuse.copy_start.default, torch.ops.qfuse.copy_end.default

#: In the meta of the node that begins a copy: the buffer that is copied.
_COPIED = "qfuse_copied"


def register() -> None:
    lowering.register_lowering(START, type_promotion_kind=None)(_start)
    lowering.register_lowering(END, type_promotion_kind=None)(_end)


def _start(x: Any, to: torch.device, behind: Any) -> Any:
    node = V.graph.current_node
    of: Any = node.args[0]
    if V.graph.graph_inputs.get(of.target) is None:
        # A padded tensor would be copied by more than one transfer of memory. What backward is
        # given must never be brought into another layout: the host may not have it yet.
        strides = of.meta["val"].stride()
        strides = [s.node.expr if isinstance(s, torch.SymInt) else s for s in strides]
        # Without this, what is not written yet would be written twice: for the copy, and for the
        # rest.
        x.realize()
        x = ir.ExternKernel.require_exact_strides(x, strides)
    node.meta[_COPIED] = x
    return _call(START, x, to, behind)


def _end(ticket: Any, x: Any, to: torch.device) -> Any:
    """The end reads the very buffer of the start, whose memory nothing else may take until then."""
    begun: Any = V.graph.current_node.args[0]
    return _call(END, ticket, begun.meta.pop(_COPIED), to)


def _call(op: torch._ops.OpOverload, *args: Any) -> Any:
    copy: Any = ir.FallbackKernel.create(op, *args)
    # Inductor takes a tensor on the host for unaligned, and what is made of it as well.
    V.graph.unaligned_buffers.discard(copy.get_name())
    return ir.TensorBox.create(copy)
