"""Run the PTX of Triton's `inline_asm_elementwise` on numpy: its interpreter has no PTX.

It knows as many instructions as our kernels have. Arguments and results are packed in 32-bit
registers as the GPU packs them, the first element lowest.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]


def _prmt(a: Words, b: Words, selector: Words) -> Words:
    """Pick bytes of b:a by the nibbles of the selector; bit 3 of one replicates the byte's sign."""
    pair = (b.astype(np.uint64) << np.uint64(32)) | a
    result = np.zeros_like(a)
    for j in range(4):
        nibble = (selector >> np.uint32(4 * j)) & np.uint32(15)
        byte = ((pair >> ((nibble & np.uint32(7)) * np.uint64(8))) & np.uint64(255)).astype(
            np.uint32
        )
        sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
        byte = np.where(nibble & np.uint32(8), sign, byte)
        result |= byte << np.uint32(8 * j)
    return result


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    """Compute any function of three bits, by its values at abc = 000 to 111."""
    result = np.zeros_like(a)
    for i in range(8):
        if int(table.flat[0]) >> i & 1:
            parts = [x if i >> bit & 1 else ~x for x, bit in ((a, 2), (b, 1), (c, 0))]
            result |= parts[0] & parts[1] & parts[2]
    return result


OPERATIONS: dict[str, Callable[..., Words]] = {
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
}


def run(text: str, inputs: list[Words], outputs: int) -> list[Words]:
    """Return the registers $0 to $(outputs - 1); the inputs are those after them."""
    registers = {f"${outputs + i}": words for i, words in enumerate(inputs)}
    like = inputs[0]

    def value(name: str) -> Words:
        if name in registers:
            return registers[name]
        return np.full_like(like, int(name, 0))

    for line in re.split(r"[;{}]", text):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        operation, arguments = line.split(maxsplit=1)
        to, *given = (name.strip() for name in arguments.split(","))
        registers[to] = OPERATIONS[operation](*map(value, given))
    return [registers[f"${i}"] for i in range(outputs)]


def elementwise(
    asm: str, constraints: str, args: list[Any], dtype: tuple[Any, ...], is_pure: bool, pack: int
) -> tuple[Any, ...]:
    """Stand in for `triton.language.inline_asm_elementwise`, of bytes to 16-bit values."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    (packed,) = args
    data = packed.handle.data
    assert data.dtype == np.uint8 and pack == 4 and is_pure
    assert constraints == "=&r,=&r,=&r,=&r,r" and len(dtype) == 2
    words = np.ascontiguousarray(data).reshape(-1).view(np.uint32)
    results = run(asm, [words], 4)
    tensors = []
    for i, kind in enumerate(dtype):
        pairs = (
            np.stack([results[2 * i], results[2 * i + 1]], -1).view(np.uint16).reshape(data.shape)
        )
        values = pairs if kind == tl.bfloat16 else pairs.view(np.float16)
        handle = TensorHandle(values, kind)
        tensors.append(tl.tensor(handle, tl.block_type(kind, list(data.shape))))
    return tuple(tensors)
