"""compressed-tensors (llm-compressor): NVFP4, MXFP4, 4-bit integers and FP8.

NVFP4 has `weight_packed` uint8 [N, K / 2], the first code of a pair low, `weight_scale` E4M3 and
`weight_global_scale`, by which scales are divided. Integers of 4 bits lie in `weight_packed` int32
[N, K / 8], the first lowest, as what they are plus 8; `weight_zero_point` likewise, along N.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from inductor_q.loading.found import (
    Find,
    Found,
    Read,
    Shapes,
    bytes_of,
    e4m3_of,
    grouped,
    int4_name,
    nibbles_of,
    not_a_matrix,
    per_row,
)


def reader(config: Mapping[str, Any]) -> Find | str:
    layout = str(config.get("format"))
    if layout not in _LAYOUTS:
        return f"its format is {layout!r}; what is read is {', '.join(_LAYOUTS)}"
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return "its weights are sparse as well"
    if (config.get("transform_config") or {}).get("config_groups"):
        return "it has a transform_config: the inputs of its layers may be rotated"
    groups = config.get("config_groups") or {}
    bits = {group["weights"]["num_bits"] for group in groups.values() if group.get("weights")}
    if layout == "pack-quantized" and bits - {4}:
        return f"its integers have {sorted(bits)} bits; what is read is 4"
    return _LAYOUTS[layout]


def _fp4(shapes: Shapes, name: str) -> Found | str | None:
    packed, scale = shapes.get(f"{name}_packed"), shapes.get(f"{name}_scale")
    if packed is None or scale is None:
        return None
    if problem := not_a_matrix(shapes, f"{name}_packed", f"{name}_scale"):
        return problem
    rows, columns = packed[0], 2 * packed[1]
    block = 16 if f"{name}_global_scale" in shapes else 32
    if scale != (rows, -(-columns // block)):
        return f"{name}_scale is {scale}; what is read is one for each {block} of {columns} columns"

    def read(tensor: Read) -> dict[str, Tensor]:
        operands = {
            "qweight": bytes_of(tensor(f"{name}_packed")).reshape(-1),
            "scale": bytes_of(tensor(f"{name}_scale")).reshape(-1),
        }
        if block == 16:
            operands["global_divisor"] = per_row(tensor(f"{name}_global_scale"), rows)
        return operands

    return Found("nvfp4_divided_rows" if block == 16 else "mxfp4", (rows, columns), read)


def _integers(shapes: Shapes, name: str) -> Found | str | None:
    packed, scale = shapes.get(f"{name}_packed"), shapes.get(f"{name}_scale")
    if packed is None or scale is None:
        return None
    if problem := not_a_matrix(shapes, f"{name}_packed", f"{name}_scale"):
        return problem
    if f"{name}_g_idx" in shapes:
        return f"{name} has activation ordering (weight_g_idx)"
    rows, columns = packed[0], 8 * packed[1]
    format = int4_name(columns, columns // scale[1])
    if scale[0] != rows or format is None:
        return f"{name}_scale is {scale} for {rows} rows of {columns}; groups are 32, 64, 128, ..."

    def read(tensor: Read) -> dict[str, Tensor]:
        scales = tensor(f"{name}_scale")
        if f"{name}_zero_point" in shapes:
            zeros = nibbles_of(tensor(f"{name}_zero_point").t().contiguous()).t()[:rows]
        else:
            zeros = torch.full(scales.shape, 8, dtype=torch.uint8, device=scales.device)
        return grouped(bytes_of(tensor(f"{name}_packed")), scales, zeros, columns)

    return Found(format, (rows, columns), read)


def _fp8(shapes: Shapes, name: str) -> Found | str | None:
    scale = shapes.get(f"{name}_scale")
    if scale is None or name not in shapes:
        return None
    if problem := not_a_matrix(shapes, name):
        return problem
    rows, columns = shapes[name]

    def read(tensor: Read) -> dict[str, Tensor]:
        scales = tensor(f"{name}_scale")
        scales = per_row(scales, rows) if scale in ((), (1,)) else scales.reshape(-1)
        return {"qweight": e4m3_of(tensor(name)), "scale": scales}

    if scale in ((), (1,), (rows, 1)):
        return Found("fp8_e4m3_row", (rows, columns), read)
    if scale == (-(-rows // 128), -(-columns // 128)):
        return Found("fp8_e4m3_128x128", (rows, columns), read)
    return f"{name}_scale is {scale}, for a weight {shapes[name]}"


_LAYOUTS: dict[str, Callable[[Shapes, str], Found | str | None]] = {
    "nvfp4-pack-quantized": _fp4,
    "mxfp4-pack-quantized": _fp4,
    "pack-quantized": _integers,
    "float-quantized": _fp8,
}
