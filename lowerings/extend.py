"""Lower `qfuse::extend`, `extend_dropped` and `extend_grads` to one wide buffer.

Its parts are written into it, as a `ConcatKernel` does for `cat`. Here are two differences that
extend_k needs: the blocks move into the buffer before anything else has fixed their layout, and a
product may read a block from there while it writes beside it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor import ir, lowering
from torch._inductor.virtualized import V

from inductor_q.lowerings import adapter_grads
from inductor_q.lowerings.kernel_out import KernelOut


def register() -> None:
    lowering.register_lowering(torch.ops.qfuse.extend.default, type_promotion_kind=None)(lower)
    dropped = torch.ops.qfuse.extend_dropped.default
    lowering.register_lowering(dropped, type_promotion_kind=None)(lower_dropped)
    grads = torch.ops.qfuse.extend_grads.default
    lowering.register_lowering(grads, type_promotion_kind=None)(lower_grads)


def lower(
    blocks: Sequence[Any], lefts: Sequence[Any], rights: Sequence[Any], padding: int
) -> ir.TensorBox:
    if padding and not rights:
        first = blocks[0]
        size = [*first.get_size()[:-1], padding]
        zeros = lowering.full(size, 0, dtype=first.get_dtype(), device=first.get_device())
        blocks = [*blocks, zeros]
    rights = _padded(rights, padding)
    products = [
        (left, right.get_size()[-1], functools.partial(_times, right))
        for left, right in zip(lefts, rights, strict=True)
    ]
    return _wide(blocks, products)


def lower_dropped(
    x: Any, seeds: Any, index: int, a: Any, count: int, p: float, padding: int
) -> ir.TensorBox:
    width = a.get_size()[0] + padding

    def project(source: ir.TensorBox) -> ir.TensorBox:
        size = [source.get_size()[0], width]
        layout = ir.FlexibleLayout(device=x.get_device(), dtype=x.get_dtype(), size=size)
        inputs = [ir.ExternKernel.realize_input(t) for t in (source, seeds, a)]
        inputs[2] = ir.ExternKernel.require_contiguous(inputs[2])
        node = KernelOut(
            layout=layout,
            inputs=inputs,
            constant_args=(index, count, p),
            python_kernel_name="qfuse_dropout_project_out",
            op_overload=torch.ops.qfuse.dropout_project.out,
        )
        return ir.TensorBox.create(node)

    return _wide([x], [(x, width, project)])


def lower_grads(
    blocks: Sequence[Any],
    grads: Sequence[Any],
    bs: Sequence[Any],
    ps: Sequence[Any],
    factors_p: Sequence[float],
    factors_b: Sequence[float],
    padding: int,
) -> list[ir.TensorBox]:
    if not grads:
        return [lower(blocks, (), (), padding)]
    of_bs: list[ir.TensorBox] = []

    def multiply(b: Any, p: Any, by: tuple[float, float], columns: int, grad: Any) -> ir.TensorBox:
        of_p, of_b = adapter_grads.multiply(grad, p, b, by[0], by[1], columns)
        of_bs.append(of_b)
        return of_p

    products = []
    factors = zip(factors_p, factors_b, strict=True)
    for i, (grad, b, p, by) in enumerate(zip(grads, bs, ps, factors, strict=True)):
        columns = padding if i == len(bs) - 1 else 0
        make = functools.partial(multiply, b, p, by, columns)
        products.append((grad, b.get_size()[-1] + columns, make))
    return [_wide(blocks, products), *of_bs]


def _padded(rights: Sequence[Any], padding: int) -> list[Any]:
    """Put columns of zeros behind the last of some matrices."""
    return [*rights[:-1], *(adapter_grads.pad(last, padding) for last in rights[-1:])]


def _times(right: Any, left: ir.TensorBox) -> Any:
    return lowering.lowerings[torch.ops.aten.mm.default](left, right)


def _wide(
    blocks: Sequence[Any], products: Sequence[tuple[Any, Any, Callable[[ir.TensorBox], Any]]]
) -> ir.TensorBox:
    """Place the blocks side by side, and behind them what each product makes of its input: a
    matrix of so many columns."""
    first = blocks[0]
    lead = list(first.get_size())[:-1]
    widths = [b.get_size()[-1] for b in blocks]
    total = sum(widths) + sum(width for _, width, _ in products)
    size = [*lead, total]
    layout = ir.FixedLayout(
        device=first.get_device(),
        dtype=first.get_dtype(),
        size=size,
        stride=ir.FlexibleLayout.contiguous_strides(size),
    )
    buffer = ir.ConcatKernel(name=None, layout=layout, inputs=[])
    storage = ir.StorageBox(buffer)

    parts: list[Any] = []
    in_place: dict[int, ir.TensorBox] = {}
    start = 0
    for block, width in zip(blocks, widths, strict=True):
        if len(block.get_size()) != len(size):
            block = lowering.view(block, [*lead, width])
        place = ir.SliceView.create(storage, len(lead), start, start + width, clamp=False)
        part = ir.ConcatKernel.realize_into(block, place)
        parts.append(part)
        # Products read a block through its own buffer: through the wide one, they would wait for
        # themselves.
        in_place[id(block)] = _matrix(ir.StorageBox(part), 0, width, total, lead)
        start += width
    rows = math.prod(lead)
    for left, width, make in products:
        source = in_place.get(id(left))
        if source is None:
            source = lowering.view(left, [rows, left.get_size()[-1]])
        place = _matrix(storage, start, width, total, lead).data
        parts.append(ir.ConcatKernel.realize_into(make(source), place))
        start += width

    buffer.name = V.graph.register_buffer(buffer)
    buffer.inputs = ir.ConcatKernel.unwrap_storage(parts)
    V.graph.register_operation(buffer)
    return ir.TensorBox(storage)


def _matrix(
    storage: ir.StorageBox, start: Any, width: Any, total: Any, lead: Sequence[Any]
) -> ir.TensorBox:
    """View columns `start` to `start + width` of the wide buffer as a matrix."""
    layout = storage.get_layout()
    return ir.TensorBox(
        ir.ReinterpretView(
            data=storage,
            layout=ir.FixedLayout(
                device=layout.device,
                dtype=layout.dtype,
                size=[math.prod(lead), width],
                stride=[total, 1],
                offset=start,
            ),
        )
    )
