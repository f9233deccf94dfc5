"""Products with packed experts in FP8: when, and how `qfuse::scatter2scatter` is told.

The op multiplies in FP8 where it is given the scales of the weights' rows. They follow from what
the rows' blocks share, and backward reads those of forward, as for other layers
(`emit_eight_bits`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from inductor_q import comparison
from inductor_q.capture.example import example
from inductor_q.context import Context
from inductor_q.kernels.calls import DENSE
from inductor_q.kernels.dispatch import served_by, stands_against
from inductor_q.kernels.expert_calls import ARGUMENTS, Scatter2Scatter, unchecked
from inductor_q.ops.eight_bits import unable
from inductor_q.passes.emit_eight_bits import emit_scale_of_stack

_FORMAT, _OPERANDS, _SHAPE, _ROW_SCALE = map(
    ARGUMENTS.index, ("format", "operands", "shape", "row_scale")
)
LEAST = "quantize_products.min_expert_elements"
DENSE_EXPERTS = "experts in 16 bits stay so: only packed ones are computed in FP8"
COMPARED = "experts are not compared: only layers with one weight are"


def refused(node: fx.Node, context: Context) -> str:
    """Return why a product with experts stays in 16 bits; empty where FP8 serves it."""
    compute = context.resolved.compute
    if compute != "fp8":
        return f"experts stay in 16 bits: no kernel here multiplies groups of rows in {compute}"
    if node.args[_FORMAT] == DENSE:
        return DENSE_EXPERTS
    if comparison.active():
        return COMPARED
    if (named := context.kernel("scatter2scatter")) != "auto":
        return f"qfuse.kernels has {named!r} for scatter2scatter, which multiplies in 16 bits"
    call = in_fp8(unchecked(example(node.args)))
    if reason := unable(compute, call.device):
        return reason
    if call.x.dtype is not torch.bfloat16:
        return f"the product is in {call.x.dtype}; qfuse.compute='fp8' is for bfloat16"
    least, each = context.threshold(LEAST), call.rows // call.num_experts * call.in_features
    if each < least:
        return f"an expert's input has {each} elements, fewer than {LEAST}={least} of the preset"
    return stands_against(call.op, call)


def in_fp8(call: Scatter2Scatter) -> Scatter2Scatter:
    """Return the call as it would be in FP8."""
    rows = call.shape[0] * call.shape[1]
    return replace(call, row_scale=call.x.new_empty((rows,), dtype=torch.float32))


def provider(node: fx.Node) -> str:
    """Name who will compute a product that is not refused."""
    call = in_fp8(unchecked(example(node.args)))
    return served_by(call.op, call)


def operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return what a product's weights are stored in."""
    args: Any = node.args
    return tuple(args[_OPERANDS])


def emit(graph: fx.Graph, node: fx.Node) -> None:
    """Give a product the scales of its experts' rows."""
    args: Any = node.args
    experts, rows, columns = args[_SHAPE]
    flat = [experts * rows, columns]
    with graph.inserting_before(node):
        scale = emit_scale_of_stack(graph, args[_OPERANDS], args[_FORMAT], flat, node)
    node.update_arg(_ROW_SCALE, scale)
