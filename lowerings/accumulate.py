"""`qfuse::accumulate` in Inductor: the product is added into the buffer that the matrix lies in.

Only into memory that nobody else reads: the result of a kernel in a buffer of its own, used once.
Everything else becomes `addmm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import sympy
import torch
from torch import fx
from torch._inductor import ir, lowering
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

aten = torch.ops.aten
OP = torch.ops.qfuse.accumulate.default


def register() -> None:
    lowering.register_lowering(OP, type_promotion_kind=None)(lower)


def lower(out: ir.TensorBox, a: Any, b: Any) -> Any:
    if V.graph.cpp_wrapper or not _is_ours(out):
        return lowering.lowerings[aten.addmm.default](out, a, b)
    AddProduct(out, ir.ExternKernel.realize_input(a), ir.ExternKernel.realize_input(b))
    return out


def _is_ours(out: ir.TensorBox) -> bool:
    node = V.graph.current_node
    source = cast(fx.Node, node.args[0])
    if len(source.users) != 1 or source in node.args[1:] or not _allocates(source.target):
        return False
    kernel = out.data.data if isinstance(out.data, ir.StorageBox) else None
    if isinstance(kernel, ir.MultiOutput):
        return not kernel.get_inputs_that_alias_output()
    return type(kernel) is ir.ExternKernelOut


def _allocates(target: Any) -> bool:
    """Whether an op's result is memory of its own; a lowering may return an input for others."""
    return target in (aten.mm.default, OP) or getattr(target, "namespace", "") == "bitsandbytes"


class AddProduct(ir.ExternKernel):
    """`out.addmm_(a, b)` in the generated code; it has no result, so `out` is freed as it was."""

    def __init__(self, out: ir.TensorBox, a: ir.IRNode, b: ir.IRNode) -> None:
        buffer: Any = out
        buffer.freeze_layout()  # a concatenation may not move it any more
        layout = ir.NoneLayout(device=out.get_device())
        super().__init__(None, layout, self.unwrap_storage([out, a, b]))
        V.graph.mark_buffer_mutated(out.get_name())
        self.name = V.graph.register_buffer(self)
        V.graph.register_operation(self)

    def codegen(self, wrapper: Any) -> None:
        out, a, b = (cast(ir.IRNode, x).codegen_reference() for x in self.inputs)
        wrapper.writeline(f"{out}.addmm_({a}, {b})")

    def should_allocate(self) -> bool:
        return False

    def get_mutation_names(self) -> Sequence[str]:
        return [self.input_name(0)]

    def get_unbacked_symbol_defs(self) -> OrderedSet[sympy.Symbol]:
        return OrderedSet()
