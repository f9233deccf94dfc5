"""Lower `qfuse::extend` to one wide buffer that its parts are written into.

A `ConcatKernel` does so for `cat`. Here are two differences that extend_k needs: the blocks move
into the buffer before anything else has fixed their layout, and a product may read a block from
there while it writes beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir, lowering
from torch._inductor.virtualized import V


def register() -> None:
    lowering.register_lowering(torch.ops.qfuse.extend.default, type_promotion_kind=None)(lower)


def lower(blocks: Sequence[Any], lefts: Sequence[Any], rights: Sequence[Any]) -> ir.TensorBox:
    first = blocks[0]
    lead = list(first.get_size())[:-1]
    widths = [b.get_size()[-1] for b in blocks] + [r.get_size()[-1] for r in rights]
    total = sum(widths)
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
    for block, width in zip(blocks, widths, strict=False):
        place = ir.SliceView.create(storage, len(lead), start, start + width, clamp=False)
        part = ir.ConcatKernel.realize_into(block, place)
        parts.append(part)
        # Products read a block through its own buffer: through the wide one, they would wait for
        # themselves.
        in_place[id(block)] = _matrix(ir.StorageBox(part), 0, width, total, lead)
        start += width
    rows = math.prod(lead)
    for left, right in zip(lefts, rights, strict=True):
        width = right.get_size()[-1]
        source = in_place.get(id(left))
        if source is None:
            source = lowering.view(left, [rows, left.get_size()[-1]])
        product = lowering.lowerings[torch.ops.aten.mm.default](source, right)
        place = _matrix(storage, start, width, total, lead).data
        parts.append(ir.ConcatKernel.realize_into(product, place))
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
