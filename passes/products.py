"""The products of a LoRA layer, forward or backward, PEFT's or hand-written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from inductor_q.ops.registry import define_ops
from inductor_q.passes.graph import (
    ADD,
    CAST,
    MM,
    MUL,
    arg,
    is_tensor,
    peel_rows,
    peel_transposes,
    same_shape,
    tensor,
    widens,
)

define_ops()  # the vocabulary

MAX_RANK = 512
DEQUANTIZE = torch.ops.qfuse.dequantize.default
MATERIALIZE = torch.ops.qfuse.materialize.default


@dataclass(frozen=True)
class Product:
    """A 2-D product `lhs @ rhs`; `x` is `lhs` below views that only regroup rows."""

    node: fx.Node
    lhs: fx.Node
    rhs: fx.Node
    x: fx.Node

    @property
    def inner(self) -> int:
        """The contracted size, -1 where it is symbolic."""
        size = tensor(self.rhs).shape[0]
        return size if isinstance(size, int) else -1

    @property
    def cols(self) -> int:
        """The columns of the product, -1 where they are symbolic."""
        size = tensor(self.rhs).shape[1]
        return size if isinstance(size, int) else -1

    @property
    def weight(self) -> fx.Node | None:
        """The dequantized weight that `rhs` is (transposed or not), if it is one."""
        below, _ = peel_transposes(self.rhs)
        return below if below.target is DEQUANTIZE else None


def as_product(node: object) -> Product | None:
    """Read `node` as a product with static inner size and columns; None where it is none."""
    if not is_tensor(node) or node.target is not MM:
        return None
    lhs, rhs = arg(node, 0), arg(node, 1)
    product = Product(node, lhs, rhs, peel_rows(lhs))
    return product if product.inner > 0 and product.cols > 0 else None


def as_scaled(node: fx.Node) -> tuple[fx.Node, float | fx.Node] | None:
    """Return `(x, factor)` where `node` is `x * factor` in the dtype of x. The factor is a number
    or a scalar tensor, as which Dynamo passes a module's float under dynamic shapes, with casts.
    """
    mul = node
    if node.target is CAST and len(arg(node, 0).users) == 1:
        mul = arg(node, 0)
    if mul.target is not MUL or mul.kwargs or not is_tensor(mul.args[0]):
        return None
    x, factor = arg(mul, 0), mul.args[1]
    if tensor(x).dim() == 0 or tensor(x).dtype != tensor(node).dtype:
        return None
    if mul is not node and (tensor(mul).dtype == tensor(x).dtype or not is_tensor(factor)):
        return None
    if isinstance(factor, (int, float)):
        return x, float(factor)
    return (x, factor) if is_tensor(factor) and tensor(factor).dim() == 0 else None


def is_rank(size: int, of: int) -> bool:
    """Whether `size` may be the rank of an adapter of a dimension `of`."""
    return size <= MAX_RANK and 2 * size <= of


def is_projection(product: Product) -> bool:
    """Whether a product is `x @ A'`, which projects onto a rank from something larger."""
    return (
        product.weight is None
        and is_rank(product.cols, product.inner)
        and tensor(product.node).dtype.is_floating_point
    )


def sums(graph: fx.Graph) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Yield root and terms, left to right, of every maximal tree of additions without a factor."""
    inside: set[fx.Node] = set()
    for node in reversed(graph.find_nodes(op="call_function", target=ADD)):
        if node not in inside and is_tensor(node) and not node.kwargs:  # alpha
            yield node, _terms(node, inside)


def _terms(node: fx.Node, inside: set[fx.Node]) -> list[fx.Node]:
    """List the terms of a tree of additions, left to right; inner additions join `inside`. One in
    16 bits, cast to float32, is part of an addition in float32: its terms are added there."""
    if len(node.all_input_nodes) != 2:
        return [node]  # a number, or twice the same
    inside.add(node)
    found: list[fx.Node] = []
    for term in (arg(node, 0), arg(node, 1)):
        below = arg(term, 0) if widens(term) and len(term.users) == 1 else term
        if (
            is_tensor(below)
            and below.target is ADD
            and not below.kwargs
            and len(below.users) == 1
            and same_shape(below, node)
            and (below is not term or tensor(term).dtype == tensor(node).dtype)
        ):
            found += _terms(below, inside)
        else:
            found.append(term)
    return found


def packed_weight(dequantize: fx.Node | None) -> fx.Node | None:
    """Find the packed operand of a `qfuse::dequantize` node."""
    if dequantize is None:
        return None
    operand = dequantize.args[0][0]  # type: ignore[index]
    assert isinstance(operand, fx.Node)
    while operand.op != "placeholder" and operand.all_input_nodes:
        operand = operand.all_input_nodes[0]
    return operand
