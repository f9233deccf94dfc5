"""Bring every source of a quantized weight into one form: `qfuse.dequantize -> mm`.

bitsandbytes' `gemm_4bit`, its `dequantize_4bit` chains (the backward of 0.50, both directions of
0.49) and our own `qfuse::linear` and `lora_linear` become `qfuse::dequantize` in the compute dtype
and a plain matrix product. A cast of a dequantization is folded into it, so that values, which are
computed in float32, are rounded once.

A linear layer of few rows becomes `qfuse::linear` instead where a kernel of ours reads the packed
weight: in CUDA up to the preset's `linear_rows.max_rows`, in Triton, for any format, up to its
`linear_rows.triton_max_rows`, but fewer of a k-bit weight that is not large. Elsewhere fewer rows
than the preset's `canonicalize.min_rows` are refused, and so is the kernel in Triton for them:
bitsandbytes' own kernel reads packed bytes and is not beaten by a dequantization and a product. A
dequantized weight that the graph returns is refused too, for it has no product here; the
dequantization itself is ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from inductor_q import capture
from inductor_q.capture.library import Decoded, Linear, Refused, Weight
from inductor_q.context import Context
from inductor_q.formats import get_format
from inductor_q.kernels import linear_rows_cuda, linear_rows_triton
from inductor_q.kernels.checks import DTYPES
from inductor_q.kernels.dispatch import served_by
from inductor_q.kernels.provider import REFERENCE
from inductor_q.kernels.rows_calls import LinearRows
from inductor_q.passes.graph import (
    ADD,
    ADDMM,
    CAST,
    MM,
    MUL,
    PERMUTE,
    RESHAPE,
    VIEWS,
    as_matrix,
    emit,
    peel_rows,
    replace,
    replay,
    rows,
    tensor,
)
from inductor_q.passes.runner import Site

LEAVES = (
    "the dequantized weight leaves the graph, so no product is fused with it: a graph break stands "
    "behind it, as PEFT's DoRA makes"
)


@dataclass(frozen=True)
class FewRows:
    """A linear layer of few rows, whose packed weight a kernel of ours reads."""

    linear: Linear


class Canonicalize:
    name: ClassVar[str] = "canonicalize"
    stage: ClassVar[str] = "joint"

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        for node in graph.nodes:
            found = capture.match(node)
            if found is None:
                continue
            if isinstance(found, Refused):
                yield Site(node, found.reason, found.weight)
                continue
            weight = found.weight.operands[0]
            if isinstance(found, Linear) and (provider := _for_few_rows(found, context)):
                yield Site(
                    node, "", weight, plan=FewRows(found), provider=provider, op="linear_rows"
                )
                continue
            reason = _too_few_rows(found, context)
            provider = context.dequantizer(tensor(node).device, found.weight)
            yield Site(
                node, reason, weight, found, by_choice=True, provider=provider, op="dequantize"
            )
            if isinstance(found, Decoded) and _leaves(node):
                yield Site(node, LEAVES, weight)

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        node = site.node
        plan: FewRows | Linear | Decoded = site.plan
        with graph.inserting_before(node):
            if isinstance(plan, FewRows):
                new = _emit_few_rows(graph, node, plan.linear)
            elif isinstance(plan, Linear):
                new = _emit_linear(graph, node, plan)
            else:
                new = emit_dequantize(graph, plan.weight, plan.dtype, node)
        replace(node, new)
        graph.erase_node(node)
        if isinstance(plan, Decoded):
            for weight in (new, *_fold_casts(graph, new, plan, context.numerics)):
                _split_bias(graph, weight)


def _for_few_rows(found: Linear, context: Context) -> str:
    """Name the kernel that reads the packed weight for so few rows; empty where there is none."""
    name = few_rows_by(found.x, found.weight, context)
    return "" if name == linear_rows_triton.KERNEL.name and _too_few_rows(found, context) else name


def few_rows_by(x: fx.Node, weight: Weight, context: Context) -> str:
    """Name the kernel that multiplies the rows of `x`, if they are few, with a packed weight."""
    rows_of, count = tensor(x), rows(x)
    most = context.threshold("linear_rows.max_rows")
    fmt = get_format(weight.format)
    features, columns = weight.shape
    by_triton = context.threshold("linear_rows.triton_max_rows")
    by_cuda = most
    if fmt.planes and features * columns < context.threshold("linear_rows.min_elements_of_planes"):
        by_triton = context.threshold("linear_rows.triton_max_rows_of_planes")
        by_cuda = min(most, linear_rows_cuda.MOST_TOGETHER)
    known = all(isinstance(size, int) for size in rows_of.shape)  # others decode
    if not known or not 0 < count <= max(most, by_triton):
        return ""
    operands = [tensor(o) for o in weight.operands]
    matrix = rows_of.reshape(count, columns)
    call = LinearRows(matrix, [operands], fmt, [features], [None], [None])
    name = served_by("linear_rows", call)
    limits = {linear_rows_triton.KERNEL.name: by_triton, linear_rows_cuda.KERNEL.name: by_cuda}
    if count > limits.get(name, most):
        return ""
    return "" if name == REFERENCE else name


def _too_few_rows(found: Linear | Decoded, context: Context) -> str:
    if isinstance(found, Decoded) or not found.kernel:
        return ""
    least, count = context.threshold("canonicalize.min_rows"), rows(found.x)
    if count < least:
        return (
            f"{count} rows, fewer than canonicalize.min_rows={least} of the preset: "
            f"{found.kernel} reads packed weights and is faster here"
        )
    return ""


def _leaves(node: fx.Node) -> bool:
    """Whether the graph returns the value, or a cast or view of it."""
    through = {*VIEWS, PERMUTE, CAST}
    return any(u.op == "output" or (u.target in through and _leaves(u)) for u in node.users)


def emit_dequantize(graph: fx.Graph, weight: Weight, dtype: torch.dtype, like: fx.Node) -> fx.Node:
    """Emit `qfuse::dequantize` of `weight` at the insertion point."""
    args = (list(weight.operands), weight.format, list(weight.shape), dtype)
    return emit(graph, torch.ops.qfuse.dequantize.default, args, like)


def _emit_linear(graph: fx.Graph, node: fx.Node, plan: Linear) -> fx.Node:
    dtype = tensor(node).dtype
    x = as_matrix(graph, plan.x)
    weight = emit_dequantize(graph, plan.weight, dtype, node)
    y = emit(graph, MM, (x, emit(graph, PERMUTE, (weight, [1, 0]), node)), node)
    for a, b, scaling in plan.adapters:
        y = emit(graph, ADD, (y, _emit_adapter(graph, x, a, b, scaling, dtype, node)), node)
    if len(tensor(node).shape) != 2:
        shape = [*_sizes(graph, plan.x, node), plan.weight.shape[0]]
        y = emit(graph, RESHAPE, (y, shape), node)
    if plan.bias is None:
        return y
    # The bias comes last, so that this sum and PEFT's with an adapter are one tree of additions.
    bias = plan.bias
    if tensor(bias).dtype != dtype:
        bias = emit(graph, CAST, (bias, dtype), node)
    return emit(graph, ADD, (y, bias), node)


def _emit_few_rows(graph: fx.Graph, node: fx.Node, plan: Linear) -> fx.Node:
    """Emit `qfuse::linear`, to which the adapters are added behind."""
    x, weight = plan.x, plan.weight
    args = (x, list(weight.operands), weight.format, list(weight.shape), plan.bias)
    y = emit(graph, torch.ops.qfuse.linear.default, args, node)
    if not plan.adapters:
        return y
    matrix, dtype = as_matrix(graph, x), tensor(node).dtype
    for a, b, scaling in plan.adapters:
        added = _emit_adapter(graph, matrix, a, b, scaling, dtype, node)
        if len(tensor(node).shape) != 2:
            added = emit(graph, RESHAPE, (added, list(tensor(node).shape)), node)
        y = emit(graph, ADD, (y, added), node)
    return y


def _emit_adapter(
    graph: fx.Graph,
    x: fx.Node,
    a: fx.Node,
    b: fx.Node,
    scaling: float,
    dtype: torch.dtype,
    like: fx.Node,
) -> fx.Node:
    def to_dtype(node: fx.Node, to: torch.dtype) -> fx.Node:
        return node if tensor(node).dtype == to else emit(graph, CAST, (node, to), like)

    own = tensor(a).dtype
    rank = emit(graph, MM, (to_dtype(x, own), emit(graph, PERMUTE, (a, [1, 0]), like)), like)
    out = emit(graph, MM, (rank, emit(graph, PERMUTE, (b, [1, 0]), like)), like)
    return to_dtype(emit(graph, MUL, (out, scaling), like), dtype)


def _sizes(graph: fx.Graph, x: fx.Node, like: fx.Node) -> list[Any]:
    """Return the leading sizes of `x`, with nodes for symbols."""
    return [
        size if isinstance(size, int) else emit(graph, torch.ops.aten.sym_size.int, (x, dim), like)
        for dim, size in enumerate(tensor(x).shape[:-1])
    ]


def _fold_casts(graph: fx.Graph, node: fx.Node, plan: Decoded, numerics: str) -> list[fx.Node]:
    """Turn each cast of a dequantization into a dequantization in the cast's dtype.

    A cast from float32 keeps its value, since a dequantization computes in float32 and rounds then.
    A cast from a 16-bit dtype (bitsandbytes' backward decodes in the dtype the weight once had) is
    rounded once less; numerics "strict" leaves that one in.
    """
    found = []
    for user in list(node.users):
        dtype = user.args[1] if user.target is CAST else None
        if dtype in DTYPES and (plan.dtype is torch.float32 or numerics != "strict"):
            assert isinstance(dtype, torch.dtype)
            with graph.inserting_before(user):
                new = emit_dequantize(graph, plan.weight, dtype, user)
            replace(user, new)
            graph.erase_node(user)
            found.append(new)
    return found


def _split_bias(graph: fx.Graph, weight: fx.Node) -> None:
    """Split `addmm(bias, x, W')`: `x @ W'` and, above the view that restores its rank, `+ bias`.

    A bias with rows of its own is added below that view, where it has its shape.
    """
    for user in list(weight.users):
        if user.target is PERMUTE:
            _split_bias(graph, user)
        if user.target is not ADDMM or user.kwargs or user.args[2] is not weight:
            continue
        top = user
        with graph.inserting_before(user):
            value = emit(graph, MM, user.args[1:], user)
        view = next(iter(user.users)) if len(user.users) == 1 else user
        if view is not user and peel_rows(view) is user and tensor(user.args[0]).dim() == 1:
            top = view
            with graph.inserting_before(view):
                value = replay(graph, view, value, view)
        with graph.inserting_before(top):
            value = emit(graph, ADD, (value, user.args[0]), top)
        replace(top, value)
