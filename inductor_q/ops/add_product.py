"""`qfuse::add_product`: a product that is added to another one, in place where that is safe."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from inductor_q.kernels.calls import AddProduct
from inductor_q.kernels.dispatch import serve
from inductor_q.ops.library import define

aten = torch.ops.aten

#: Whose results are in memory of their own.
_PRODUCTS = frozenset({aten._scaled_mm.default, aten.mm.default})


def add_product(base: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """Return `base + alpha * (a @ b)` in the dtype of all three, rounded once.

    In a compiled graph it takes the memory of a product `base` that nothing else reads.

    Args:
        base: [M, N].
        a: [M, K].
        b: [K, N].
    """
    return torch.addmm(base, a, b, alpha=alpha)


def add_product_(base: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> None:
    """Add `alpha * (a @ b)` to `base` [M, N] in place, rounded once."""
    call = AddProduct(base, a, b, alpha)
    call.check()
    serve("add_product", call)


def owns_memory(node: fx.Node) -> bool:
    """Whether a result is in memory of its own: a product, or a sum that begins with one."""
    sums = (torch.ops.qfuse.add_product.default, torch.ops.qfuse.add_dropout_grad_x.default)
    return node.target in _PRODUCTS or node.target in sums


def takes_base(node: fx.Node) -> bool:
    """Whether a node of `qfuse::add_product` or `add_dropout_grad_x` may write to its base.

    It may if the base is a product, no other node reads it, and it is no other argument as well.
    """
    base = node.args[0]
    if not isinstance(base, fx.Node) or not owns_memory(base):
        return False
    return len(base.users) == 1 and node.args.count(base) == 1


def define_add_product() -> None:
    rest = "Tensor a, Tensor b, float alpha=1.0)"
    define(f"add_product(Tensor base, {rest} -> Tensor", add_product, add_product)
    in_place = f"add_product_(Tensor(a!) base, {rest} -> ()"
    define(in_place, add_product_, lambda base, a, b, alpha=1.0: None)
