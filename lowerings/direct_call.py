"""Let generated code call the Python functions behind ops, past the dispatcher.

A call through the dispatcher is boxed, unboxed and sent through the autograd key on its way, and
its arguments are checked again, which costs the host more than the launches of a small layer. They
were checked when the op was traced, and Inductor's code runs where gradients are not recorded.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch._inductor import ir, lowering
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree

from inductor_q.capture.example import example
from inductor_q.kernels.dispatch import served_by
from inductor_q.kernels.expert_calls import unchecked
from inductor_q.kernels.provider import warn_passed_over
from inductor_q.kernels.scatter2scatter_dequantize import preferred
from inductor_q.lowerings import calls
from inductor_q.lowerings.in_force import in_force, is_ours
from inductor_q.lowerings.kind import kind_argument

OP = "scatter2scatter"
SCATTER2SCATTER = torch.ops.qfuse.scatter2scatter.default
BY_THE_OP = "C++ wrapper code calls the op, which takes no provider"

#: Op -> the function of `inductor_q.lowerings.calls` that serves it.
FUNCTIONS: dict[Any, Any] = {
    SCATTER2SCATTER: calls.qfuse_scatter2scatter,
    torch.ops.qfuse.add_product_.default: calls.qfuse_add_product,
    torch.ops.qfuse.grouped_gram.default: calls.qfuse_grouped_gram,
    torch.ops.qfuse.tile_map.default: calls.qfuse_tile_map,
    torch.ops.qfuse.linear.default: calls.qfuse_linear,
    torch.ops.qfuse.linears.default: calls.qfuse_linears,
    torch.ops.qfuse.dropout_project.default: calls.qfuse_dropout_project,
    torch.ops.qfuse.dropout_grad_a.default: calls.qfuse_dropout_grad_a,
    torch.ops.qfuse.dropout_grad_x.default: calls.qfuse_dropout_grad_x,
    torch.ops.qfuse.add_dropout_grad_x_.default: calls.qfuse_add_dropout_grad_x,
}


def register() -> None:
    for op in FUNCTIONS:
        lowering.add_layout_constraint(op, as_traced)
        lowering.register_lowering(op, type_promotion_kind=None)(_lower(op))


def as_traced(node: torch.fx.Node, *args: Any, **kwargs: Any) -> Any:
    """Keep layouts as they were traced, since kernels read rows.

    What is only viewed as rows is computed in the shape that it had: in another it would not share
    a kernel with what is computed from the same tensors.
    """
    for arg in args:
        if isinstance(arg, ir.TensorBox) and isinstance(arg.data, ir.View):
            arg.realize()
    return lowering.constrain_to_fx_strides(node, *args, **kwargs)


def _lower(op: torch._ops.OpOverload) -> Any:
    def lower(*args: Any) -> Any:
        if op is SCATTER2SCATTER:
            _count_provider()
        outputs = DirectCall.create(op, *args)
        return pytree.tree_map(ir.TensorBox.create, outputs)

    return lower


def _count_provider() -> None:
    """Report who will serve the node that is being lowered."""
    compile, node = in_force(), V.graph.current_node
    call = unchecked(example(node.args))
    wanted = preferred(call, compile.kernel(OP), compile.decoded_from())
    compile.count_provider(call.op, served_by(call.op, call, wanted))


class DirectCall(ir.FallbackKernel):
    """A call as Inductor writes it for an op that it does not know, but to another function."""

    def codegen(self, wrapper: Any) -> None:
        # The cache of another backend's compiles outlives our names; a C++ wrapper calls no Python.
        if is_ours() and not V.graph.cpp_wrapper:
            name = FUNCTIONS[self.op_overload].__name__
            wrapper.add_import_once(f"from inductor_q.lowerings.calls import {name}")
            self.python_kernel_name = name
        elif self.op_overload is SCATTER2SCATTER and in_force().kernel(OP) != "auto":
            warn_passed_over(OP, in_force().kernel(OP), BY_THE_OP)
        super().codegen(wrapper)

    def codegen_args(self) -> list[str]:
        args: list[str] = super().codegen_args()
        if self.python_kernel_name == calls.qfuse_scatter2scatter.__name__:
            large = in_force().decoded_from()
            args += [repr(in_force().kernel(OP)), repr(large and tuple(large))]
        return args

    def codegen_kwargs(self, skip_out: bool = False) -> list[str]:
        kwargs: list[str] = super().codegen_kwargs(skip_out)
        function = FUNCTIONS[self.op_overload]
        if (
            self.python_kernel_name == function.__name__
            and "kind" in signature(function).parameters
        ):
            kwargs += kind_argument(function.__name__, self.constant_args, self.inputs)
        return kwargs
