"""Attention of a few queries that see the same keys, on a GPU with two Triton launches.

One sequence and head of keys has too few queries for a program, and there are few of these, so keys
are split: a program reads one part and leaves its largest score, its sum and its mean of values
unfinished; a second launch joins the parts in their order, so results are the same every time. Of
blocks of keys that the mask hides nothing is read: a static cache is empty behind what was written.
(Dao et al., "Flash-Decoding for long-context inference", 2023, splits keys so.)
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inductor_q.kernels.checks import DTYPES
from inductor_q.kernels.provider import TritonProvider
from inductor_q.kernels.rows_calls import AttentionRows
from inductor_q.kernels.triton_launch import Repeated

#: The most bytes that the queries of a head of keys take, and their number: a program holds them.
MAX_BYTES, MAX_ROWS = 16384, 64
#: The features that a tile of a product may have.
FEATURES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Config:
    """Keys of a block, programs for each processor of a GPU, and warps of a program.

    Start values, not measured.
    """

    block: int = 32
    programs: int = 2
    num_warps: int = 4


class Triton(TritonProvider[AttentionRows]):
    def refuses(self, call: AttentionRows) -> str:
        rows, features = call.query.shape[2:]
        if call.query.dtype not in DTYPES:
            return f"dtype {call.query.dtype} is not one of float32, bfloat16, float16"
        if features not in FEATURES:
            return f"a head has {features} features, not one of {', '.join(map(str, FEATURES))}"
        if rows > MAX_ROWS or _padded(rows) * features * call.query.itemsize > MAX_BYTES:
            return f"{rows} queries see the same keys, more than a program holds"
        if any(t.stride(-1) != 1 for t in (call.query, call.key, call.value, call.mask)):
            return "features or the mask's columns do not lie side by side"
        return ""

    def plan(self, call: AttentionRows) -> Plan:
        return Plan(call)


class Plan:
    """The launches for all calls that are like the first one."""

    def __init__(self, call: AttentionRows, config: Config | None = None) -> None:
        config = config or Config()
        batch, heads, rows, features = call.query.shape
        keys = call.key.shape[2]
        blocks = -(-keys // config.block)
        wanted = -(-config.programs * _processors(call.device) // (batch * heads))
        span = -(-blocks // min(blocks, wanted)) * config.block
        self._parts = -(-keys // span)
        self._shape = (batch * heads, self._parts, rows)
        self._features = features
        attend, join = _kernels()
        strides = [
            *(call.query.stride()[:3] + call.key.stride()[:3] + call.value.stride()[:3]),
            call.mask.stride(0) if call.mask.shape[0] > 1 else 0,
        ]
        self._attend = Repeated(
            attend,
            (self._parts, batch * heads, 1),
            (heads, rows, keys, span, *strides),
            {
                "ROWS": _padded(rows),
                "FEATURES": features,
                "BLOCK": config.block,
                "SCALE": call.scale * math.log2(math.e),
            },
            num_warps=config.num_warps,
        )
        parts = 1 << (self._parts - 1).bit_length()
        self._join = Repeated(
            join,
            (rows, batch * heads, 1),
            (rows, self._parts),
            {"PARTS": parts, "FEATURES": features},
            num_warps=4,
        )

    def __call__(self, call: AttentionRows) -> Tensor:
        out = call.result()
        sums = torch.empty((2, *self._shape), dtype=torch.float32, device=out.device)
        values = torch.empty((*self._shape, self._features), dtype=torch.float32, device=out.device)
        mask = call.mask.view(torch.uint8)
        self._attend([call.query, call.key, call.value, mask, sums[0], sums[1], values])
        self._join([out, sums[0], sums[1], values])
        return out


def _padded(rows: int) -> int:
    """Return how many rows a tile of a product has."""
    return max(16, 1 << (rows - 1).bit_length())


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 8  # for the interpreter
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@functools.cache
def _kernels() -> tuple[Any, Any]:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["heads", "rows", "keys", "span", "at_mask"])
    def attend(
        query,
        key,
        value,
        mask,
        highest,
        totals,
        values,
        heads,
        rows,
        keys,
        span,
        at_query,
        at_query_head,
        at_query_row,
        at_key,
        at_key_head,
        at_key_row,
        at_value,
        at_value_head,
        at_value_row,
        at_mask,
        ROWS: tl.constexpr,
        FEATURES: tl.constexpr,
        BLOCK: tl.constexpr,
        SCALE: tl.constexpr,
    ):
        part = tl.program_id(0)
        both = tl.program_id(1)
        sequence = (both // heads).to(tl.int64)
        head = (both % heads).to(tl.int64)
        row = tl.arange(0, ROWS)
        feature = tl.arange(0, FEATURES)
        query += sequence * at_query + head * at_query_head
        key += sequence * at_key + head * at_key_head
        value += sequence * at_value + head * at_value_head
        mask += sequence * at_mask
        real = (row < rows)[:, None]
        q = tl.load(query + row[:, None] * at_query_row + feature[None], mask=real, other=0.0)
        high = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mean = tl.zeros([ROWS, FEATURES], tl.float32)
        end = tl.minimum(part * span + span, keys)
        for start in range(part * span, end, BLOCK):
            at = start + tl.arange(0, BLOCK)
            seen = tl.load(mask + at, mask=at < end, other=0) != 0
            if tl.max(seen.to(tl.int32), 0) != 0:
                wide = at.to(tl.int64)[:, None]
                k = tl.load(key + wide * at_key_row + feature[None], mask=seen[:, None], other=0.0)
                scores = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE
                scores = tl.where(seen[None], scores, -float("inf"))
                new = tl.maximum(high, tl.max(scores, 1))  # finite: some key is seen
                weights = tl.exp2(scores - new[:, None])
                v = tl.load(
                    value + wide * at_value_row + feature[None], mask=seen[:, None], other=0.0
                )
                before = tl.exp2(high - new)
                total = total * before + tl.sum(weights, 1)
                mean = mean * before[:, None]
                mean += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
                high = new
        place = (both * tl.num_programs(0) + part) * rows + row
        tl.store(highest + place, high, mask=row < rows)
        tl.store(totals + place, total, mask=row < rows)
        tl.store(values + place[:, None] * FEATURES + feature[None], mean, mask=real)

    @triton.jit(do_not_specialize=["rows", "parts"])
    def join(
        out, highest, totals, values, rows, parts, PARTS: tl.constexpr, FEATURES: tl.constexpr
    ):
        row = tl.program_id(0)
        both = tl.program_id(1)
        feature = tl.arange(0, FEATURES)
        part = tl.arange(0, PARTS)
        place = (both * parts + part) * rows + row
        high = tl.load(highest + place, mask=part < parts, other=-float("inf"))
        most = tl.max(high, 0)
        # No key is seen: nothing is larger, and the sum is zero.
        weights = tl.where(high == -float("inf"), 0.0, tl.exp2(high - most))
        total = tl.sum(weights * tl.load(totals + place, mask=part < parts, other=0.0), 0)
        wide = place[:, None] * FEATURES + feature[None]
        all_values = tl.load(values + wide, mask=(part < parts)[:, None], other=0.0)
        mean = tl.sum(all_values * weights[:, None], 0)
        mean = mean / tl.where(total == 0.0, 1.0, total)
        tl.store(out + (both * rows + row) * FEATURES + feature, mean)

    return attend, join


KERNEL = Triton()
