"""GPTQ in 4 bits, as AutoGPTQ and GPTQModel write it: `(code - zero_point) * scale`.

`qweight` int32 [K / 8, N] has eight codes of a column of the layer, the first lowest; `scales` is
[groups, N], `qzeros` int32 [groups, N / 8]. Version 1 of the layout ("gptq") stores zero points
that are one less, version 2 does not. `g_idx` has the group of each input. With act-order
(`desc_act`, for all layers or in GPTQModel's `dynamic` for some) inputs of a group do not lie side
by side; columns are then sorted by it, and the layer puts its input in that order.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from inductor_q.exc import CorruptQuantState
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
    not_a_matrix,
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
    if problem := not_a_matrix(shapes, f"{base}qweight"):
        return problem
    rows, columns = packed[1], 8 * packed[0]
    format = int4_name(columns, group)
    if format is None:
        return f"groups of {group} in {columns} columns of {name}; what is read is 32, 64, 128, ..."

    groups = 1 if group == -1 else columns // group
    wanted = {f"{base}scales": (groups, rows), f"{base}qzeros": (groups, rows // 8)}
    has_groups = act_order or f"{base}g_idx" in shapes
    of_inputs = {f"{base}g_idx": (columns,)} if has_groups else {}
    if problem := misshapen(shapes, {**wanted, **of_inputs}):
        return problem

    def read(tensor: Read) -> dict[str, Tensor]:
        order = _order(f"{base}g_idx", tensor, columns // groups) if has_groups else None
        words = tensor(f"{base}qweight").t()
        if order is None:
            qweight = bytes_of(words)
        else:
            qweight = pack_nibbles(nibbles_of(words.contiguous())[:, order])
        zeros = nibbles_of(tensor(f"{base}qzeros")).t() + added
        operands = grouped(qweight, tensor(f"{base}scales").t(), zeros, columns)
        return operands if order is None else {**operands, "columns": order}

    return Found(format, (rows, columns), read)


def _order(name: str, tensor: Read, group: int) -> Tensor | None:
    """Return the columns sorted by their group; None where they lie so.

    Raises:
        CorruptQuantState: some group has not as many as the others.
    """
    of_columns = tensor(name).long()
    expected = torch.arange(len(of_columns), device=of_columns.device) // group
    # Zeros alone are of writers that left it empty: every reader takes groups in order then.
    if torch.equal(of_columns, expected) or not of_columns.any():
        return None
    order = of_columns.argsort(stable=True)
    if not torch.equal(of_columns[order], expected):
        groups = len(of_columns) // group
        sizes = (of_columns == torch.arange(groups, device=of_columns.device)[:, None]).sum(1)
        wrong = int((sizes != group).nonzero()[0])
        raise CorruptQuantState(
            what=f"{name}, the group of each input,",
            expected=f"each of {groups} groups for {group} inputs",
            got=f"group {wrong} for {int(sizes[wrong])}",
            remedy="Quantize the model again, or take g_idx out of a checkpoint whose groups lie "
            "in order.",
        )
    return order
