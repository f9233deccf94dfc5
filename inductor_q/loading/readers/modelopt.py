"""NVIDIA's ModelOpt: NVFP4 and FP8, by the names of what stands beside a weight.

NVFP4 has `weight` uint8 [N, K / 2], the first code of a pair low, `weight_scale` E4M3 [N, K / 16]
and `weight_scale_2`, one float32: a value is `code * (scale * scale_2)`. FP8 has an E4M3 `weight`
and one `weight_scale`. What ModelOpt writes for inputs (`input_scale`) is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from inductor_q.loading.found import (
    Find,
    Found,
    Read,
    Shapes,
    bytes_of,
    e4m3_of,
    not_a_matrix,
    per_row,
)


def reader(config: Mapping[str, Any]) -> Find | str:
    return _find


def _find(shapes: Shapes, name: str) -> Found | str | None:
    scale = shapes.get(f"{name}_scale")
    if scale is None or name not in shapes:
        return None
    if f"{name.removesuffix('weight')}pre_quant_scale" in shapes:
        return f"the input of {name} is scaled before the product (pre_quant_scale)"
    if problem := not_a_matrix(shapes, name):
        return problem
    rows, stored = shapes[name]

    def read(tensor: Read) -> dict[str, Tensor]:
        if f"{name}_scale_2" not in shapes:
            scale = per_row(tensor(f"{name}_scale"), rows)
            return {"qweight": e4m3_of(tensor(name)), "scale": scale}
        return {
            "qweight": bytes_of(tensor(name)).reshape(-1),
            "scale": bytes_of(tensor(f"{name}_scale")).reshape(-1),
            "global_scale": per_row(tensor(f"{name}_scale_2"), rows),
        }

    if f"{name}_scale_2" not in shapes:
        if scale not in ((), (1,)):
            return f"{name}_scale is {scale}; what is read is one number, or NVFP4's"
        return Found("fp8_e4m3_row", (rows, stored), read)
    if scale != (rows, -(-2 * stored // 16)):
        return f"{name}_scale is {scale}; what is read is one for each 16 of {2 * stored} columns"
    return Found("nvfp4_rows", (rows, 2 * stored), read)
