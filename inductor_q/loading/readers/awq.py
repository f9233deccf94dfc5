"""AWQ in 4 bits, as AutoAWQ's "gemm" layout: `(code - zero_point) * scale`.

`qweight` int32 [K, N / 8] and `qzeros` [groups, N / 8] have eight neighbours along N in the order
0, 2, 4, 6, 1, 3, 5, 7, the first lowest; `scales` is [groups, N].
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from inductor_q.formats.layout import Interleaved
from inductor_q.loading.found import (
    Find,
    Found,
    Read,
    Shapes,
    grouped,
    int4_name,
    misshapen,
    nibbles_of,
    not_a_matrix,
    pack_nibbles,
)

ORDER = Interleaved(2)


def reader(config: Mapping[str, Any]) -> Find | str:
    if config.get("bits", config.get("w_bit")) != 4:
        return f"AWQ in {config.get('bits')} bits; what is read is 4"
    layout = str(config.get("version", "gemm")).lower()
    if layout != "gemm":
        return f"AWQ's layout {layout!r}; what is read is 'gemm'"
    return partial(_find, group=int(config.get("group_size", config.get("q_group_size", 128))))


def _find(shapes: Shapes, name: str, *, group: int) -> Found | str | None:
    base = name.removesuffix("weight")
    packed = shapes.get(f"{base}qweight")
    if packed is None:
        return None
    if problem := not_a_matrix(shapes, f"{base}qweight"):
        return problem
    rows, columns = 8 * packed[1], packed[0]
    format = int4_name(columns, group)
    if format is None:
        return f"groups of {group} in {columns} columns of {name}; what is read is 32, 64, 128, ..."

    groups = 1 if group == -1 else columns // group
    wanted = {f"{base}scales": (groups, rows)}
    if f"{base}qzeros" in shapes:
        wanted[f"{base}qzeros"] = (groups, packed[1])
    if problem := misshapen(shapes, wanted):
        return problem

    def read(tensor: Read) -> dict[str, Tensor]:
        qweight = pack_nibbles(nibbles_of(tensor(f"{base}qweight"), ORDER).t())
        scales = tensor(f"{base}scales").t()
        if f"{base}qzeros" in shapes:
            zeros = nibbles_of(tensor(f"{base}qzeros"), ORDER).t()
        else:
            zeros = torch.full(scales.shape, 8, dtype=torch.uint8, device=scales.device)
        return grouped(qweight, scales, zeros, columns)

    return Found(format, (rows, columns), read)
