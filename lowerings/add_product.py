"""Lower `qfuse::add_product`: in place, where the base is a product that nothing else reads."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch._inductor import ir, lowering
from torch._inductor.virtualized import V

from inductor_q.lowerings.direct_call import DirectCall
from inductor_q.ops.add_product import takes_base

ADD_PRODUCT = torch.ops.qfuse.add_product.default
IN_PLACE = torch.ops.qfuse.add_product_.default


def register() -> None:
    lowering.register_lowering(ADD_PRODUCT, type_promotion_kind=None)(lower_add_product)


def lower_add_product(base: Any, a: Any, b: Any, alpha: float = 1.0) -> ir.TensorBox:
    """Return the base's buffer, to which the product is added, or the sum in another one: so in C++
    wrapper code, where a call of an op of Python costs more than a copy."""
    if V.graph.cpp_wrapper or not takes_base(V.graph.current_node):
        addmm = lowering.lowerings[torch.ops.aten.addmm.default]
        return cast(ir.TensorBox, addmm(base, a, b, alpha=alpha))
    base.realize()
    DirectCall.create(IN_PLACE, base, a, b, alpha)
    return cast(ir.TensorBox, base)
