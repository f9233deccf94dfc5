"""Emit products in eight bits: their weights, the cast of their input, and the product itself.

All of it but the decode consists of torch's operators. Where several weights of one format are
wanted side by side, one call decodes them to where they belong. Backward decodes a weight again and
reads the scales of forward, a number for each row: a small launch less for each weight. Forward
has the scales of weights that backward multiplies by at a time in one vector, of which each product
of its own reads a part: backward would copy them to one otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from inductor_q.formats import get_format
from inductor_q.kernels import rounding
from inductor_q.ops import eight_bits
from inductor_q.passes.frozen_weights import emit_cast_of_weight, emit_scale_of_rows
from inductor_q.passes.graph import (
    CAT,
    CLONE,
    PERMUTE,
    SLICE,
    emit,
    inline,
    peel_transposes,
    tensor,
)
from inductor_q.passes.products import Product
from inductor_q.passes.recompute import keep_once

ROW_AMAX = torch.ops.qfuse.row_amax.default
ROW_SCALE = torch.ops.qfuse.row_scale.default
REQUANTIZE = torch.ops.qfuse.requantize.default
VIEW = torch.ops.aten.view.default
VIEW_AS = torch.ops.aten.view.dtype
UNSQUEEZE = torch.ops.aten.unsqueeze.default


def emit_weights(
    graph: fx.Graph, products: Sequence[Product], dtype: torch.dtype
) -> tuple[fx.Node, fx.Node]:
    """Emit the scales [N] of weights' rows, and their codes side by side, transposed: [K, N]."""
    like = products[0].node
    scale = _emit_scales(graph, products, dtype, like)
    if not _decode_together(products, dtype):
        made = [
            _emit_codes(graph, product, _part_of(graph, scale, product, products), dtype)
            for product in products
        ]
        return scale, emit(graph, CAT, (made, 1), like)
    operands, format, shape, parts = _side_by_side(products)
    packed = (operands, scale, format, shape, dtype, True, parts)
    return scale, emit(graph, REQUANTIZE, packed, like)


def weight_key(product: Product) -> Hashable:
    """Return what products with one weight have in common, those of forward and backward."""
    weight = _weight(product)
    if product.weight is None:
        return weight
    args: Any = weight.args
    operands, format, shape, _ = args
    return (*operands, format, *shape)


def _weight(product: Product) -> fx.Node:
    return peel_transposes(product.rhs)[0]


def _side_by_side(products: Sequence[Product]) -> tuple[Any, str, list[int], list[int]]:
    """Return the operands of weights of one format, the format, their shape as one matrix, whose
    rows are those of all of them, and how many rows each has."""
    args: list[Any] = [_weight(product).args for product in products]
    operands = [operand for of_one, *_ in args for operand in of_one]
    parts = [shape[0] for _, _, shape, _ in args]
    _, format, (_, columns), _ = args[0]
    return operands, format, [sum(parts), columns], parts


def _decode_together(products: Sequence[Product], dtype: torch.dtype) -> bool:
    """Whether one call decodes all weights: they are packed in one format, not of eight bits."""
    if not all(is_decoded(product, dtype) for product in products):
        return False
    return len({_weight(product).args[1] for product in products}) == 1


def is_decoded(product: Product, dtype: torch.dtype) -> bool:
    """Whether a product's weight is packed, and not as numbers of this dtype already."""
    return product.weight is not None and _stored_codes(_weight(product), dtype) is None


def emit_weight(
    graph: fx.Graph,
    product: Product,
    beside: Sequence[Product],
    dtype: torch.dtype,
    *,
    transposed: bool,
) -> tuple[fx.Node, fx.Node]:
    """Emit the scales [N] of a weight's rows, and its codes [N, K], or [K, N] if `transposed`.

    The scales are a part of one vector, of those of the weights `beside` it, with itself among
    them: backward reads them all.
    """
    whole = _emit_scales(graph, beside, dtype, product.node)
    scale = _part_of(graph, whole, product, beside)
    return scale, _emit_codes(graph, product, scale, dtype, transposed=transposed)


def emit_cast(
    graph: fx.Graph,
    inputs: Sequence[fx.Node],
    factor: fx.Node | None,
    like: fx.Node,
    dtype: torch.dtype,
) -> list[fx.Node]:
    """Emit the cast of `inputs` side by side, times `factor`: codes, and the scales of rows."""
    return inline(graph, functools.partial(_cast, dtype), [factor, *inputs], like)


def emit_product(
    graph: fx.Graph, cast: Sequence[fx.Node], codes: fx.Node, scale: fx.Node | None, like: fx.Node
) -> fx.Node:
    """Emit the product of a cast input and a weight's codes, whose rows are its columns."""
    columns = emit(graph, PERMUTE, (codes, [1, 0]), like)
    of_columns = None if scale is None else emit(graph, UNSQUEEZE, (scale, 0), like)
    factors = [cast[0], columns, cast[1], of_columns]
    scaled = functools.partial(eight_bits.scaled_product, dtype=tensor(like).dtype)
    (new,) = inline(graph, scaled, factors, like)
    return new


def _emit_scales(
    graph: fx.Graph, products: Sequence[Product], dtype: torch.dtype, like: fx.Node
) -> fx.Node:
    """Emit the scales of weights' rows in one vector, for which forward and backward ask."""

    def make() -> fx.Node:
        if len(products) == 1:
            return _emit_scale(graph, products[0], dtype, like)
        if _decode_together(products, dtype) and _shares_largest(products[0]):
            return _emit_packed_scale(graph, _side_by_side(products), dtype, like)
        scales = [_emit_scale(graph, product, dtype, like) for product in products]
        return emit(graph, CAT, (scales, 0), like)

    key = (dtype, *map(weight_key, products))
    source = next(iter(_weight(products[0]).all_input_nodes), _weight(products[0]))
    return keep_once(source, key, like, make=make)


def _emit_scale(graph: fx.Graph, product: Product, dtype: torch.dtype, like: fx.Node) -> fx.Node:
    """Emit the scales [N] of a weight's rows."""
    weight = _weight(product)
    if product.weight is None:
        return emit_scale_of_rows(graph, weight, like, dtype)
    if _stored_codes(weight, dtype) is not None:
        return emit(graph, ROW_SCALE, weight.args[:3], like)
    return _emit_packed_scale(graph, weight.args[:3], dtype, like)


def emit_scale_of_stack(
    graph: fx.Graph, operands: Sequence[fx.Node], format: str, shape: Sequence[int], like: fx.Node
) -> fx.Node:
    """Emit the scales for e4m3 of the rows of a stack, which `shape` has as one matrix."""
    packed, dtype = (operands, format, shape), torch.float8_e4m3fn
    make = functools.partial(_emit_packed_scale, graph, packed, dtype, like)
    return keep_once(operands[0], (*operands, format, *shape), like, make=make)


def _emit_packed_scale(
    graph: fx.Graph, packed: tuple[Any, ...], dtype: torch.dtype, like: fx.Node
) -> fx.Node:
    """Emit the scales of rows by their largest numbers: operands, format, shape and parts, if any,
    are those of `qfuse::row_amax`."""
    amax = emit(graph, ROW_AMAX, packed, like)
    (scale,) = inline(graph, functools.partial(rounding.to_scale, dtype=dtype), [amax], like)
    return scale


def _shares_largest(product: Product) -> bool:
    """Whether the scales of a weight's blocks tell the largest numbers of its rows: otherwise it is
    decoded for them, and what decodes several weights at a time decodes each as often."""
    args: Any = _weight(product).args
    return get_format(args[1]).largest > 0


def _part_of(
    graph: fx.Graph, scale: fx.Node, product: Product, products: Sequence[Product]
) -> fx.Node:
    """Emit the part of `products`' scales that one of them has: a view, which is never kept."""
    if len(products) == 1:
        return scale
    start = 0
    for other in products:
        end = start + tensor(_weight(other)).shape[0]
        if weight_key(other) == weight_key(product):
            break
        start = end
    part = emit(graph, SLICE, (scale, 0, start, end), product.node)
    part.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return part


def _emit_codes(
    graph: fx.Graph,
    product: Product,
    scale: fx.Node,
    dtype: torch.dtype,
    *,
    transposed: bool = True,
) -> fx.Node:
    """Emit the codes of a weight under its scales; as they are stored, where in eight bits."""
    weight, like = _weight(product), product.node
    if product.weight is None:
        return emit_cast_of_weight(graph, weight, scale, like, dtype, transposed=transposed)
    args: Any = weight.args
    operands, format, shape, _ = args
    stored = _stored_codes(weight, dtype)
    if stored is None:
        packed = (operands, scale, format, shape, dtype, transposed)
        return emit(graph, REQUANTIZE, packed, weight)
    codes: fx.Node = operands[stored]
    if tensor(codes).dtype is not dtype:
        codes = emit(graph, VIEW_AS, (codes, dtype), weight)
    if tuple(tensor(codes).shape) != tuple(shape):
        codes = emit(graph, VIEW, (codes, shape), weight)
    if transposed:
        turned = emit(graph, PERMUTE, (codes, [1, 0]), weight)
        codes = emit(graph, CLONE, (turned,), weight, memory_format=torch.contiguous_format)
    return codes


def _stored_codes(weight: fx.Node, dtype: torch.dtype) -> int | None:
    args: Any = weight.args
    operands, format, shape, _ = args
    return eight_bits.stored_codes([tensor(o) for o in operands], format, shape, dtype)


def _cast(dtype: torch.dtype, factor: Tensor | None, *parts: Tensor) -> tuple[Tensor, Tensor]:
    return rounding.cast_together(parts, dtype, factor)
