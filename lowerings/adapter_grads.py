"""Lower `qfuse::adapter_grads` to one call that writes two buffers.

The gradient of the projection may be columns of a wider buffer, as a product of torch's may. That
of B is a buffer of its own, to which the same call writes.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch._inductor import ir, lowering
from torch._inductor.virtualized import V

from inductor_q.lowerings.kernel_out import KernelOut

aten = torch.ops.aten


def register() -> None:
    op = torch.ops.qfuse.adapter_grads.default
    lowering.register_lowering(op, type_promotion_kind=None)(lower)


def lower(
    grad: Any, p: Any, b: Any, factor_p: float, factor_b: float
) -> tuple[ir.TensorBox, ir.TensorBox]:
    read = {user.args[1] for user in V.graph.current_node.users}
    # A result that nothing reads gets no buffer.
    return multiply(grad, p, b, factor_p, factor_b, apart=len(read) < 2)


def multiply(
    grad: Any,
    p: Any,
    b: Any,
    factor_p: float,
    factor_b: float,
    padding: int = 0,
    *,
    apart: bool = False,
) -> tuple[ir.TensorBox, ir.TensorBox]:
    """Make both results, the first with so many columns of zeros behind it; `apart`, by a product
    of torch's each."""
    if V.graph.cpp_wrapper or apart:  # C++ wrapper code calls no Python function
        # The factor goes to B, so that the product may write into a wider buffer itself.
        of_p = _product(grad, _scaled(pad(b, padding), factor_p))
        transposed = lowering.lowerings[aten.permute.default](grad, [1, 0])
        return of_p, _scaled(_product(transposed, p), factor_b)
    device, dtype = grad.get_device(), grad.get_dtype()
    (rows, columns), rank = grad.get_size(), b.get_size()[1]
    of_b = lowering.empty_strided([columns, rank], None, dtype=dtype, device=device)
    inputs = [ir.ExternKernel.realize_input(t) for t in (grad, p, b, of_b)]
    node = KernelOut(
        layout=ir.FlexibleLayout(device=device, dtype=dtype, size=[rows, rank + padding]),
        inputs=inputs,
        constant_args=(factor_p, factor_b),
        python_kernel_name="qfuse_adapter_grads",
        op_overload=torch.ops.qfuse.adapter_grads.default,
    )
    written = ir.MutationOutput(ir.NoneLayout(device=device), inputs[3], node)
    node.mutation_outputs.append(written)
    return ir.TensorBox.create(node), cast(ir.TensorBox, of_b)


def pad(b: Any, columns: int) -> Any:
    """Put so many columns of zeros behind a matrix."""
    return lowering.lowerings[aten.constant_pad_nd.default](b, [0, columns]) if columns else b


def _product(left: Any, right: Any) -> ir.TensorBox:
    return cast(ir.TensorBox, lowering.lowerings[aten.mm.default](left, right))


def _scaled(matrix: Any, factor: float) -> ir.TensorBox:
    if factor == 1.0:
        return cast(ir.TensorBox, matrix)
    return cast(ir.TensorBox, lowering.lowerings[aten.mul.Tensor](matrix, factor))
