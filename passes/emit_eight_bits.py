"""Emit products in eight bits: their weights, the cast of their input, and the product itself.

All of it but the decode consists of torch's operators. Where several weights of one format are
wanted side by side, one call decodes them to where they belong. Backward decodes a weight again and
reads the scales of forward, a number for each row: a small launch less for each weight.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from inductor_q.ops import eight_bits
from inductor_q.passes.frozen_weights import emit_in_eight_bits
from inductor_q.passes.graph import CAT, CLONE, PERMUTE, emit, inline, peel_transposes, tensor
from inductor_q.passes.products import Product
from inductor_q.passes.recompute import keep_for_backward

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
    if not _decode_together(products, dtype):
        made = [emit_weight(graph, product, dtype, transposed=True) for product in products]
        scales, codes = ([pair[i] for pair in made] for i in (0, 1))
        return emit(graph, CAT, (scales, 0), like), emit(graph, CAT, (codes, 1), like)
    weights = [peel_transposes(product.rhs)[0] for product in products]
    scales = [_emit_scale(graph, weight, dtype) for weight in weights]
    scale = emit(graph, CAT, (scales, 0), like)
    args: list[Any] = [weight.args for weight in weights]
    operands = [operand for of_one, *_ in args for operand in of_one]
    parts = [shape[0] for _, _, shape, _ in args]
    _, format, (_, columns), _ = args[0]
    packed = (operands, scale, format, [sum(parts), columns], dtype, True, parts)
    return scale, emit(graph, REQUANTIZE, packed, like)


def _decode_together(products: Sequence[Product], dtype: torch.dtype) -> bool:
    """Whether one call decodes all weights: they are packed in one format, not of eight bits."""
    if not all(is_decoded(product, dtype) for product in products):
        return False
    return len({peel_transposes(product.rhs)[0].args[1] for product in products}) == 1


def is_decoded(product: Product, dtype: torch.dtype) -> bool:
    """Whether a product's weight is packed, and not as numbers of this dtype already."""
    weight = peel_transposes(product.rhs)[0]
    return product.weight is not None and _stored_codes(weight, dtype) is None


def emit_weight(
    graph: fx.Graph, product: Product, dtype: torch.dtype, *, transposed: bool
) -> tuple[fx.Node, fx.Node]:
    """Emit the scales [N] of a weight's rows, and its codes [N, K], or [K, N] if `transposed`."""
    weight = peel_transposes(product.rhs)[0]
    make = emit_in_eight_bits if product.weight is None else _emit_decoded
    return make(graph, weight, product.node, dtype, transposed=transposed)


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


def _emit_decoded(
    graph: fx.Graph, weight: fx.Node, like: fx.Node, dtype: torch.dtype, *, transposed: bool
) -> tuple[fx.Node, fx.Node]:
    """Emit the scales and codes of a packed weight; as they are stored, where in eight bits."""
    args: Any = weight.args
    operands, format, shape, _ = args
    stored = _stored_codes(weight, dtype)
    if stored is None:
        scale = _emit_scale(graph, weight, dtype)
        packed = (operands, scale, format, shape, dtype, transposed)
        return scale, emit(graph, REQUANTIZE, packed, weight)
    scale = keep_for_backward(emit(graph, ROW_SCALE, (operands, format, shape), weight))
    codes = operands[stored]
    if tensor(codes).dtype is not dtype:
        codes = emit(graph, VIEW_AS, (codes, dtype), weight)
    if tuple(tensor(codes).shape) != tuple(shape):
        codes = emit(graph, VIEW, (codes, shape), weight)
    if transposed:
        turned = emit(graph, PERMUTE, (codes, [1, 0]), weight)
        codes = emit(graph, CLONE, (turned,), weight, memory_format=torch.contiguous_format)
    return scale, codes


def _emit_scale(graph: fx.Graph, weight: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Emit the scales [N] of a packed weight's rows."""
    amax = emit(graph, ROW_AMAX, weight.args[:3], weight)
    (scale,) = inline(graph, functools.partial(eight_bits.to_scale, dtype=dtype), [amax], weight)
    return keep_for_backward(scale)


def _stored_codes(weight: fx.Node, dtype: torch.dtype) -> int | None:
    args: Any = weight.args
    operands, format, shape, _ = args
    return eight_bits.stored_codes([tensor(o) for o in operands], format, shape, dtype)


def _cast(dtype: torch.dtype, factor: Tensor | None, *parts: Tensor) -> tuple[Tensor, Tensor]:
    return eight_bits.cast_together(parts, dtype, factor)
