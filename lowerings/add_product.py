"""Lower `qfuse::add_product`: in place, where the base is a product that nothing else reads."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch._inductor import ir, lowering
from torch._inductor.virtualized import V

from inductor_q.lowerings.direct_call import DirectCall

aten = torch.ops.aten

ADD_PRODUCT = torch.ops.qfuse.add_product.default
IN_PLACE = torch.ops.qfuse.add_product_.default
#: Whose results are in memory of their own.
PRODUCTS = frozenset({aten._scaled_mm.default, aten.mm.default})


def register() -> None:
    lowering.register_lowering(ADD_PRODUCT, type_promotion_kind=None)(lower_add_product)


def lower_add_product(base: Any, a: Any, b: Any) -> ir.TensorBox:
    """Return the base's buffer, to which the product is added, or the sum in another one."""
    if not _is_ours_alone(V.graph.current_node.args[0]):
        return cast(ir.TensorBox, lowering.lowerings[aten.addmm.default](base, a, b))
    base.realize()
    DirectCall.create(IN_PLACE, base, a, b)
    return cast(ir.TensorBox, base)


def _is_ours_alone(base: Any) -> bool:
    """Whether the base is in memory that nothing else reads. C++ wrapper code writes out of place,
    since there a call of an op from Python costs more than a copy."""
    return base.target in PRODUCTS and len(base.users) == 1 and not V.graph.cpp_wrapper
