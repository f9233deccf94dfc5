"""DeepSeek-V3, Qwen3-FP8 and transformers' FP8Linear: E4M3 and `weight_scale_inv`.

A scale is for 128 x 128 elements, or for the whole weight, where vLLM's own checkpoints call it
`weight_scale`. A value is `code * scale_inv` in
float32, rounded once, as DeepSeek's `weight_dequant` and transformers' `Fp8Dequantize` have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from inductor_q.loading.found import Find, Found, Read, Shapes, e4m3_of, not_a_matrix, per_row

TILE = [128, 128]


def reader(config: Mapping[str, Any]) -> Find | str:
    block = config.get("weight_block_size")
    if block is not None and list(block) != TILE:
        return f"weight_block_size is {block}; what is read is {TILE}, or one scale for a weight"
    if config.get("fmt", "e4m3") != "e4m3":
        return f"its numbers are {config['fmt']}; what is read is e4m3"
    return _tiles if block is not None else _whole


def _tiles(shapes: Shapes, name: str) -> Found | str | None:
    scale = shapes.get(f"{name}_scale_inv")
    if scale is None or name not in shapes:
        return None
    if len(shapes[name]) < 2:
        return f"{name} is {shapes[name]}; what is read is a matrix or a stack of them"
    *stack, rows, columns = shapes[name]
    if scale != (*stack, -(-rows // 128), -(-columns // 128)):
        return f"{name}_scale_inv is {scale}, for a weight {shapes[name]}"
    if stack and rows % 128:
        return f"tiles of 128 rows are cut at the {rows} rows of each expert of {name}"

    def read(tensor: Read) -> dict[str, Tensor]:
        scales = tensor(f"{name}_scale_inv")
        if scales.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            scales = scales.float()  # powers of two, E8M0
        return {"qweight": e4m3_of(tensor(name)), "scale": scales.reshape(-1)}

    return Found("fp8_e4m3_128x128", shapes[name], read)


def _whole(shapes: Shapes, name: str) -> Found | str | None:
    beside = next((n for n in (f"{name}_scale_inv", f"{name}_scale") if n in shapes), None)
    if beside is None or name not in shapes:
        return None
    if problem := not_a_matrix(shapes, name):
        return problem
    rows, _ = shapes[name]
    if shapes[beside] not in ((), (1,)):
        return f"{beside} is {shapes[beside]}, for a weight {shapes[name]}"

    def read(tensor: Read) -> dict[str, Tensor]:
        return {"qweight": e4m3_of(tensor(name)), "scale": per_row(tensor(beside), rows)}

    return Found("fp8_e4m3_row", shapes[name], read)
