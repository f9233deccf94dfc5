"""Multiply a few rows with a packed weight on a GPU, with the CUDA kernel of csrc/linear_rows.cu.

The weight is read once, as it is stored, and never written as values. Each byte's pair of codes is
one look-up in a table of shared memory, and the products are those of tensor cores, so that 16 rows
cost little more than one.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch
from torch import Tensor

from inductor_q.csrc import driver, nvrtc
from inductor_q.formats import QuantFormat
from inductor_q.kernels import nibbles
from inductor_q.kernels.calls import LinearRows
from inductor_q.kernels.dequantize_cuda import TYPES, VECTOR_BYTES
from inductor_q.kernels.provider import DENSE_WEIGHT, Provider

SOURCE = "linear_rows.cu"
#: Sizes of csrc/linear_rows.cu: threads, rows of a tile, columns of a chunk, rows of x of an mma.
THREADS, TILE, CHUNK, TOKENS = 512, 16, 64, 8
#: The values that its template takes for the number of mmas that share a decoded weight.
STRIPS = (1, 2, 4)
MOST_ROWS = TOKENS * STRIPS[-1]
OUTER = 256  # scales that share an outer one
DEPTH = 2  # stages in the ring: one is read while the next is copied


class Cuda(Provider[LinearRows]):
    name = "cuda"

    def missing(self) -> str:
        return nvrtc.missing()

    def unknown(self, fmt: QuantFormat | None) -> str:
        if fmt is None:
            return DENSE_WEIGHT
        if refused := nibbles.refuses(fmt):
            return refused
        scale = fmt.blockwise
        if scale is None or scale.block % CHUNK:
            return f"{fmt.name} has not one scale for each {CHUNK} neighbours"
        if not scale.is_float and scale.outer != OUTER:
            return f"csrc/{SOURCE} does not know the scale of {fmt.name}"
        return ""

    def refuses(self, call: LinearRows) -> str:
        if refused := self.unknown(call.fmt):
            return refused
        x, (features, columns) = call.x, call.shape
        if x.device.type != "cuda":
            return f"the CUDA kernel runs on a GPU, not on {x.device}"
        if x.dtype not in (torch.bfloat16, torch.float16):
            return f"x is {x.dtype}, not of 16 bits"
        if x.shape[0] > MOST_ROWS:
            return f"{x.shape[0]} rows, more than {MOST_ROWS}"
        if columns % CHUNK:
            return f"{columns} columns, which are no multiple of {CHUNK}"
        for name, operand in zip(call.fmt.operands, call.operands, strict=True):
            if operand.dtype not in (torch.uint8, torch.float32):
                return f"{name} is {operand.dtype}, not float32"
            if not operand.is_contiguous():
                return f"{name} is not contiguous"
        bias = call.bias
        if bias is not None and (bias.shape != (features,) or not bias.is_contiguous()):
            return f"the bias is not {features} numbers in a row"
        properties: Any = torch.cuda.get_device_properties(x.device)  # annotations are partial
        needed = shared_bytes(_strips(x.shape[0]))
        if properties.major < 8 or properties.shared_memory_per_block_optin < needed:
            arch = f"sm_{properties.major}{properties.minor}"
            return f"{arch} has less than {needed:,} bytes of shared memory for a block"
        handle = _function(kernel_name(call), x.device.index)
        return handle if isinstance(handle, str) else ""

    def run(self, call: LinearRows) -> Tensor:
        x, (features, columns) = _aligned(call.x), call.shape
        qweight, *scales = _operands(call)
        qweight = _aligned(qweight)
        out = x.new_empty((x.shape[0], features))
        scale = call.fmt.blockwise
        assert scale is not None
        launch = _prepared(
            kernel_name(call),
            x.device.index,
            _programs(features, x.device.index),
            (
                *(features, columns, x.shape[0], columns, (scale.block // CHUNK).bit_length() - 1),
                *_codebook(call.fmt, x.dtype),
            ),
            shared_bytes(_strips(x.shape[0])),
        )
        tensors = (x, qweight, *scales, call.bias, out)
        launch(*(0 if t is None else t.data_ptr() for t in tensors))
        return out


def kernel_name(call: LinearRows) -> str:
    """Name the specialization of csrc/linear_rows.cu that serves a call."""
    scale = call.fmt.blockwise
    assert scale is not None
    kind = "Plain" if scale.is_float else "Nested"
    return f"linear<{TYPES[call.x.dtype]}, {kind}, {_strips(call.x.shape[0])}, {DEPTH}>"


def shared_bytes(strips: int) -> int:
    """Add up what csrc/linear_rows.cu holds: table; ring; scales, twice; their table; sums."""
    table, ring, scales = 256 * 256, DEPTH * TILE * (2048 + 32), 2 * TILE * (64 + 4) * 4
    return table + ring + scales + 1024 + THREADS // 32 * TILE * TOKENS * strips * 4


def _strips(rows: int) -> int:
    return next(n for n in STRIPS if rows <= n * TOKENS)


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.clone() if x.data_ptr() % VECTOR_BYTES else x


def _operands(call: LinearRows) -> list[Any]:
    """Put the weight's operands in the kernel's order: codes, scales, and what nests those."""
    scale = call.fmt.blockwise
    assert scale is not None
    by_name = dict(zip(call.fmt.operands, call.operands, strict=True))
    nested = [by_name[name] for name in scale.operands]
    return [by_name["qweight"], *nested, *[None] * (4 - len(nested))]


def _programs(features: int, device: int) -> int:
    """Return how many programs share the tiles: at most one for each multiprocessor."""
    tiles: int = -(-features // TILE)
    return min(tiles, torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _codebook(fmt: QuantFormat, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the kernel's last arguments: 16 values, four a word, and what undoes their stretch."""
    assert fmt.lut16 is not None
    values, stretch = nibbles.fit(fmt.lut16, dtype)
    (factor,) = struct.unpack("<i", struct.pack("<f", 1 / stretch))
    return (*values.view(torch.int64).tolist(), factor)


def _function(kernel: str, device: int) -> Any:
    return driver.function(SOURCE, kernel, device)


@functools.lru_cache(maxsize=1024)
def _prepared(
    kernel: str, device: int, programs: int, numbers: tuple[int, ...], shared: int
) -> driver.Launch:
    handle = _function(kernel, device)
    assert not isinstance(handle, str), handle
    return driver.Launch(
        handle,
        device,
        grid=programs,
        threads=THREADS,
        pointers=8,
        numbers=numbers,
        shared=shared,
    )


KERNEL = Cuda()
