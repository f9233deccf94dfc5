"""GPTQ in 4 bits, as AutoGPTQ and GPTQModel write it: `(code - zero_point) * scale`.

`qweight` int32 [K / 8, N] has eight codes of a column of the layer, the first lowest; `scales` is
[groups, N], `qzeros` int32 [groups, N / 8]. Version 1 of the layout ("gptq") stores zero points
that are one less, version 2 does not. With act-order (`desc_act`) `g_idx` has the group of each
input; columns are then sorted by it, and the layer puts its input in that order.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from inductor_q.loading.found import (
    Find,
    Found,
    Read,
    Shapes,
    bytes_of,
    grouped,
    int4_name,
    misshapen,
    nibbles_of,
    pack_nibbles,
)


def reader(config: Mapping[str, Any]) -> Find | str:
    if config.get("bits") != 4:
        return f"GPTQ in {config.get('bits')} bits; what is read is 4"
    layout = config.get("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        return f"checkpoint_format is {layout!r}; what is read is 'gptq' and 'gptq_v2'"
    return partial(
        _find,
        group=int(config.get("group_size", 128)),
        added=1 if layout == "gptq" else 0,
        act_order=bool(config.get("desc_act")),
    )


def _find(
    shapes: Shapes, name: str, *, group: int, added: int, act_order: bool
) -> Found | str | None:
    base = name.removesuffix("weight")
    packed = shapes.get(f"{base}qweight")
    if packed is None:
        return None
    rows, columns = packed[1], 8 * packed[0]
    format = int4_name(columns, group)
    if format is None:
        return f"groups of {group} in {columns} columns of {name}; what is read is 32, 64, 128, ..."

    groups = 1 if group == -1 else columns // group
    wanted = {f"{base}scales": (groups, rows), f"{base}qzeros": (groups, rows // 8)}
    of_act_order = {f"{base}g_idx": (columns,)} if act_order else {}
    if problem := misshapen(shapes, {**wanted, **of_act_order}):
        return problem

    def order(tensor: Read) -> Tensor:
        return tensor(f"{base}g_idx").long().argsort(stable=True)

    def read(tensor: Read) -> dict[str, Tensor]:
        qweight = bytes_of(tensor(f"{base}qweight").t())
        if act_order:
            codes = nibbles_of(tensor(f"{base}qweight").t().contiguous())
            qweight = pack_nibbles(codes[:, order(tensor)])
        zeros = nibbles_of(tensor(f"{base}qzeros")).t() + added
        return grouped(qweight, tensor(f"{base}scales").t(), zeros, columns)

    return Found(format, (rows, columns), read, order if act_order else None)
