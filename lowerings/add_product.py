"""Lower `qfuse::add_product` and `qfuse::add_dropout_grad_x`: in place, where the base is a product
that nothing else reads."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch._inductor import ir, lowering
from torch._inductor.virtualized import V

from inductor_q.lowerings.direct_call import DirectCall, as_traced
from inductor_q.ops.add_product import takes_base

aten = torch.ops.aten
ADD_PRODUCT = torch.ops.qfuse.add_product.default
ADD_PRODUCT_IN_PLACE = torch.ops.qfuse.add_product_.default
ADD_GRAD_X = torch.ops.qfuse.add_dropout_grad_x.default
ADD_GRAD_X_IN_PLACE = torch.ops.qfuse.add_dropout_grad_x_.default
GRAD_X = torch.ops.qfuse.dropout_grad_x.default


def register() -> None:
    lowering.register_lowering(ADD_PRODUCT, type_promotion_kind=None)(lower_add_product)
    lowering.add_layout_constraint(ADD_GRAD_X, as_traced)
    lowering.register_lowering(ADD_GRAD_X, type_promotion_kind=None)(lower_add_grad_x)


def lower_add_product(base: Any, a: Any, b: Any, alpha: float = 1.0) -> ir.TensorBox:
    if _in_place():
        return _added(ADD_PRODUCT_IN_PLACE, base, a, b, alpha)
    addmm = lowering.lowerings[aten.addmm.default]
    return cast(ir.TensorBox, addmm(base, a, b, alpha=alpha))


def lower_add_grad_x(base: Any, *args: Any) -> ir.TensorBox:
    if _in_place():
        return _added(ADD_GRAD_X_IN_PLACE, base, *args)
    gradient = lowering.lowerings[GRAD_X](*args)
    return cast(ir.TensorBox, lowering.lowerings[aten.add.Tensor](base, gradient))


def _in_place() -> bool:
    """Whether the node that is being lowered may write to its base. In C++ wrapper code none does,
    where a call of an op of Python costs more than a copy."""
    return not V.graph.cpp_wrapper and takes_base(V.graph.current_node)


def _added(op: torch._ops.OpOverload, base: Any, *args: Any) -> ir.TensorBox:
    """Return the base's buffer, to which `op` adds."""
    base.realize()
    DirectCall.create(op, base, *args)
    return cast(ir.TensorBox, base)
