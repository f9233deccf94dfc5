"""gpt-oss: experts in MXFP4, `gate_up_proj_blocks` [E, N, K / 32, 16] and `_scales` [E, N, K / 32].

The first code of a pair lies in the low nibble; a scale is E8M0. transformers holds the values as
[E, K, N], and its `convert_moe_packed_tensors` is what they are bitwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from inductor_q.loading.found import Find, Found, Read, Shapes, bytes_of


def reader(config: Mapping[str, Any]) -> Find | str:
    return _find


def _find(shapes: Shapes, name: str) -> Found | str | None:
    blocks = shapes.get(f"{name}_blocks")
    if blocks is None:
        return None
    *rows, groups, width = blocks if len(blocks) > 1 else (0, 0)
    if width != 16 or shapes.get(f"{name}_scales") != (*rows, groups):
        return f"{name}_blocks is {blocks}, its scales {shapes.get(f'{name}_scales')}"

    def read(tensor: Read) -> dict[str, Tensor]:
        return {
            "qweight": bytes_of(tensor(f"{name}_blocks")).reshape(-1),
            "scale": bytes_of(tensor(f"{name}_scales")).reshape(-1),
        }

    return Found("mxfp4", (*rows, 32 * groups), read)
