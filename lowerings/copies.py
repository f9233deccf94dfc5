"""Lower `qfuse::copy_start` and `qfuse::copy_end` to calls of the ops."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir, lowering
from torch._inductor.virtualized import V


def register() -> None:
    for op in (torch.ops.qfuse.copy_start.default, torch.ops.qfuse.copy_end.default):
        lowering.register_lowering(op, type_promotion_kind=None)(_lower(op))


def _lower(op: torch._ops.OpOverload) -> Any:
    def lower(*args: Any) -> Any:
        node = V.graph.current_node
        place = next(i for i, arg in enumerate(op._schema.arguments) if arg.name == "x")
        given = [*args]
        if V.graph.graph_inputs.get(getattr(node.args[place], "target", "")) is None:
            # A padded tensor would be copied by more than one transfer of memory. What backward is
            # given must never be brought into another layout: the host may not have it yet.
            strides = [
                s.node.expr if isinstance(s, torch.SymInt) else s
                for s in node.args[place].meta["val"].stride()  # type: ignore[union-attr]
            ]
            given[place] = ir.ExternKernel.require_exact_strides(args[place], strides)
        copy: Any = ir.FallbackKernel.create(op, *given)
        # Inductor takes a tensor on the host for unaligned, and what is made of it as well.
        V.graph.unaligned_buffers.discard(copy.get_name())
        return ir.TensorBox.create(copy)

    return lower
