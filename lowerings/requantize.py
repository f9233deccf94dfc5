"""Lower `qfuse::row_amax`, `row_scale` and `requantize`: to loop IR, or to a kernel's call.

What a row's scale follows from is a reduction over the scales of its blocks, one kernel for several
weights. A weight in eight bits is a kernel's call on a GPU, and elsewhere its decode in loop IR,
divided by the scales and rounded.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch._inductor import ir, lowering
from torch._inductor.virtualized import V, ops

from inductor_q.decode.loops import Loops
from inductor_q.formats import QuantFormat, get_format
from inductor_q.kernels import POINTWISE, PROVIDERS
from inductor_q.kernels.provider import REFERENCE, on_device, warn_passed_over
from inductor_q.lowerings.dequantize import loops_over, pointwise
from inductor_q.lowerings.in_force import in_force
from inductor_q.lowerings.kernel_out import KernelOut

OP = "requantize"
aten = torch.ops.aten


def register() -> None:
    for op, lower in (
        (torch.ops.qfuse.row_amax.default, lower_row_amax),
        (torch.ops.qfuse.row_scale.default, lower_row_scale),
        (torch.ops.qfuse.requantize.default, lower_requantize),
    ):
        lowering.register_lowering(op, type_promotion_kind=None)(lower)


def lower_row_amax(
    operands: Sequence[Any], format: str, shape: Sequence[int], parts: Sequence[int] = ()
) -> ir.TensorBox:
    """Make one kernel for the rows of all weights, in which a row reads its own weight's blocks."""
    fmt, each = get_format(format), len(get_format(format).operands)
    rows, columns = shape
    largest, step = (fmt.largest, fmt.group(columns)) if fmt.largest else (1.0, 1)
    weights = [
        loops_over(operands[i * each : (i + 1) * each], fmt, (own, columns))
        for i, own in enumerate(parts or shape[:1])
    ]

    def size(loops: Loops, row: Any, block: Any) -> Any:
        i = row * columns + block * step
        shared = fmt.shared[0].decode(loops, i) if fmt.largest else fmt.decode(loops, i)
        return ops.mul(ops.abs(shared), ops.constant(largest, torch.float32))

    def inner(index: Sequence[Any], reduced: Sequence[Any]) -> Any:
        if len(weights) == 1:
            return size(weights[0], index[0], reduced[0])
        row, start, found = ops.index_expr(index[0], torch.int64), 0, []
        for loops, own in zip(weights, parts, strict=True):
            above = ops.ge(row, ops.constant(start, torch.int64))
            below = ops.lt(row, ops.constant(start + own, torch.int64))
            load = functools.partial(size, loops, index[0] - start, reduced[0])
            found.append(ops.masked(ops.logical_and(above, below), load, 0.0))
            start += own
        return functools.reduce(ops.maximum, found)

    result: Any = ir.Reduction.create(
        device=operands[0].get_device(),
        dst_dtype=torch.float32,
        src_dtype=torch.float32,
        inner_fn=inner,
        ranges=[rows],
        reduction_ranges=[columns // step],
        reduction_type="max",
    )
    if isinstance(result.data.data, ir.Reduction):  # not unrolled: what reads it needs a buffer
        result.realize()
    return cast(ir.TensorBox, result)


def lower_row_scale(operands: Sequence[Any], format: str, shape: Sequence[int]) -> ir.TensorBox:
    fmt = get_format(format)
    rows, columns = shape
    loops = loops_over(operands, fmt, shape)
    return ir.Pointwise.create(
        device=operands[0].get_device(),
        dtype=torch.float32,
        inner_fn=lambda index: fmt.shared[0].decode(loops, index[0] * columns),
        ranges=[rows],
    )


def lower_requantize(
    operands: Sequence[Any],
    scale: Any,
    format: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    transposed: bool,
    parts: Sequence[int] = (),
) -> ir.TensorBox:
    provider = _provider(operands[0].get_device().type, get_format(format))
    in_force().count_provider(OP, provider)
    if provider != POINTWISE:
        size = list(reversed(shape)) if transposed else list(shape)
        layout = ir.FixedLayout(device=operands[0].get_device(), dtype=dtype, size=size)
        return _call([*operands, scale], layout, (format, transposed, list(parts), provider))
    fmt, each = get_format(format), len(get_format(format).operands)
    split = lowering.lowerings[aten.split_with_sizes.default](scale, list(parts or shape[:1]))
    codes = [
        _decoded(operands[i * each : (i + 1) * each], of_rows, fmt, (rows, shape[1]), dtype)
        for i, (of_rows, rows) in enumerate(zip(split, parts or shape[:1], strict=True))
    ]
    if transposed:
        codes = [lowering.lowerings[aten.permute.default](part, [1, 0]) for part in codes]
    if len(codes) > 1:
        return cast(ir.TensorBox, lowering.lowerings[aten.cat.default](codes, int(transposed)))
    return cast(ir.TensorBox, lowering.clone(codes[0]) if transposed else codes[0])


def _decoded(
    operands: Sequence[Any], scale: Any, fmt: QuantFormat, shape: Sequence[int], dtype: torch.dtype
) -> Any:
    """Divide a weight's values in loop IR by their rows' scales, and round them."""
    lowered = lowering.lowerings
    of_row = lowered[aten.unsqueeze.default](lowered[aten.reciprocal.default](scale), 1)
    scaled = lowered[aten.mul.Tensor](pointwise(operands, fmt, shape, torch.float32), of_row)
    if not dtype.is_floating_point:
        scaled = lowered[aten.round.default](scaled)
    return lowering.to_dtype(scaled, dtype)


def _provider(device_type: str, fmt: QuantFormat) -> str:
    """Choose who writes the weight: a kernel that knows its format, or loops without one."""
    wanted = in_force().kernel(OP)
    if wanted == POINTWISE or V.graph.cpp_wrapper:
        return POINTWISE
    listed = on_device(PROVIDERS[OP], device_type)
    unusable = {p.name: p.missing() or p.unknown(fmt) for p in listed}
    if reason := unusable.get(wanted):
        warn_passed_over(OP, wanted, reason)
    elif wanted in unusable:
        return wanted
    usable = (name for name, reason in unusable.items() if not reason and name != REFERENCE)
    return next(usable, POINTWISE)


class RequantizeOut(KernelOut):
    def codegen_args(self) -> list[str]:
        *operands, scale = self.references()
        return [f"[{', '.join(operands)}]", scale, *map(repr, self.constant_args)]


def _call(tensors: Sequence[Any], layout: ir.Layout, settings: tuple[Any, ...]) -> ir.TensorBox:
    inputs = [ir.ExternKernel.realize_input(x) for x in tensors]
    node = RequantizeOut(
        layout=layout,
        inputs=[ir.ExternKernel.require_contiguous(x) for x in inputs],
        constant_args=settings,
        python_kernel_name="qfuse_requantize",
        op_overload=torch.ops.qfuse.requantize.default,
    )
    return ir.TensorBox.create(node)
