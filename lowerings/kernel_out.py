"""A call of a function of `lowerings.calls` from generated code, which writes into a buffer.

The code calls the Python function itself: the dispatcher would cost more than the launch, and the
arguments were checked when the op was traced. The buffer may be a slice of a wider one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch._inductor import ir
from torch._inductor.virtualized import V

from inductor_q.lowerings.kind import kind_argument


class KernelOut(ir.ExternKernelOut):
    """A call of `python_kernel_name` with the inputs, the constants, and the buffer as `out`."""

    def codegen(self, wrapper: Any) -> None:
        name = self.python_kernel_name
        wrapper.add_import_once(f"from inductor_q.lowerings.calls import {name}")
        if self.get_name() in V.graph.removed_buffers:  # only what the call mutates is read
            wrapper.writeline(f"{name}({', '.join(self.codegen_args())})")
        else:
            super().codegen(wrapper)

    def references(self) -> list[str]:
        """Name the inputs as the generated code does."""
        return [x.codegen_reference() for x in cast(Sequence[ir.IRNode], self.inputs)]

    def codegen_args(self) -> list[str]:
        return [*self.references(), *map(repr, self.constant_args)]

    def codegen_kwargs(self, skip_out: bool = False) -> list[str]:
        tensors = [*cast(Sequence[Any], self.inputs), self]
        return kind_argument(str(self.python_kernel_name), self.constant_args, tensors)
