"""Write a weight in eight bits on a GPU with the CUDA kernels of csrc/requantize.cu.

Neighbours under one scale have 16 bytes to choose from, which are computed once and looked up with
permutations of bytes. A transposed tile goes through shared memory.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inductor_q.csrc import driver, nvrtc
from inductor_q.formats import QuantFormat
from inductor_q.kernels.calls import Requantize
from inductor_q.kernels.dequantize_cuda import VECTOR_BYTES
from inductor_q.kernels.linear_rows_sources import NIBBLES
from inductor_q.kernels.nibbles import HIGH_FIRST
from inductor_q.kernels.provider import DENSE_WEIGHT, Provider

SOURCE = "requantize.cu"
TYPES = {torch.float8_e4m3fn: "E4M3", torch.int8: "Int8"}
CHUNK = 64  # columns that share the scales; a thread has one's worth of elements


@dataclass(frozen=True)
class Config:
    """Threads of a program; or, where it transposes, rows and columns of its tile.

    Rows are a multiple of 128; columns are 64, or a multiple of 128. There is a thread for each 64
    elements of a tile, which has at most 48 K of them, a byte of shared memory each.
    """

    threads: int = 256
    rows: int = 128
    columns: int = 128


DEFAULT = Config()


class Cuda(Provider[Requantize]):
    name = "cuda"

    def missing(self) -> str:
        return nvrtc.missing()

    def unknown(self, fmt: QuantFormat | None) -> str:
        if fmt is None:
            return DENSE_WEIGHT
        if refused := NIBBLES.unknown(fmt):
            return refused
        return "" if fmt.nibbles == HIGH_FIRST else f"{fmt.name} has the low nibble first"

    def refuses(self, call: Requantize) -> str:
        if refused := self.unknown(call.fmt):
            return refused
        if call.out.device.type != "cuda":
            return f"the CUDA kernel runs on a GPU, not on {call.out.device}"
        if refused := _refuses_tensors(call):
            return refused
        handle = driver.function(SOURCE, kernel_name(call), call.out.device.index)
        return handle if isinstance(handle, str) else ""

    def plan(self, call: Requantize) -> Plan:
        return Plan(call)


class Plan:
    """A launch for all calls that are like the first one."""

    def __init__(self, call: Requantize, config: Config = DEFAULT) -> None:
        fmt, out = call.fmt, call.out.t() if call.transposed else call.out
        assert fmt.blockwise is not None and fmt.lut16 is not None
        rows, columns = out.shape
        threads = config.threads
        grid = -(-rows * columns // (threads * CHUNK))
        if call.transposed:
            threads = config.rows * config.columns // CHUNK
            grid = -(-rows // config.rows) * -(-columns // config.columns)
        names = [name for name in NIBBLES.in_order(fmt) if name is not None]
        self._order = [fmt.operands.index(name) for name in names]
        self._missing = [0] * (5 - len(names))
        self._launch = _prepared(
            kernel_name(call, config),
            out.device.index,
            grid,
            threads,
            (
                rows,
                columns,
                (fmt.blockwise.block // CHUNK).bit_length() - 1,
                call.out.stride(0),
                *_codebook(fmt.lut16),
            ),
        )

    def __call__(self, call: Requantize) -> None:
        operands = [operand.data_ptr() for operand in call.operands]
        self.at(operands, call.scale.data_ptr(), call.out.data_ptr())

    def at(self, operands: Sequence[int], scale: int, out: int) -> None:
        """Serve a call whose tensors lie at these addresses."""
        self._launch(*[operands[i] for i in self._order], *self._missing, scale, out)


def _refuses_tensors(call: Requantize) -> str:
    out, columns = call.out, call.out.shape[0 if call.transposed else 1]
    if out.dtype not in TYPES:
        return f"the output is {out.dtype}, not e4m3 or int8"
    if columns % CHUNK:
        return f"{columns} columns, which are no multiple of {CHUNK}"
    if not out.numel():
        return "there is nothing to write"
    named = dict(zip(call.fmt.operands, call.operands, strict=True))
    packed = named.pop("qweight")  # bytes, in any dtype
    assert call.fmt.blockwise is not None
    absmax, *_ = call.fmt.blockwise.operands
    coded = "" if call.fmt.blockwise.is_float else absmax  # of two levels, the first is codes
    for name, given in {**named, "scale": call.scale}.items():
        expected = torch.uint8 if name == coded else torch.float32
        if given.dtype != expected:
            return f"{name} is {given.dtype}, not {expected}"
    if scattered := call.scattered():
        return scattered
    if (packed.data_ptr() | out.data_ptr()) % VECTOR_BYTES:
        return f"codes or output are not aligned to {VECTOR_BYTES} bytes"
    return ""


def kernel_name(call: Requantize, config: Config = DEFAULT) -> str:
    """Name the specialization that serves a call."""
    assert call.fmt.blockwise is not None
    scale = "Plain" if call.fmt.blockwise.is_float else "Nested"
    types = f"{scale}, {TYPES[call.out.dtype]}"
    if call.transposed:
        return f"requantize_transposed<{types}, {config.rows}, {config.columns}>"
    return f"requantize<{types}>"


def _codebook(values: tuple[float, ...]) -> tuple[int, ...]:
    """Return 16 float32 values as integers, two in each."""
    return struct.unpack("<8q", struct.pack("<16f", *values))


def _prepared(
    kernel: str, device: int, grid: int, threads: int, numbers: tuple[int, ...]
) -> driver.Launch:
    handle = driver.function(SOURCE, kernel, device)
    assert not isinstance(handle, str), handle
    return driver.Launch(handle, device, grid=grid, threads=threads, pointers=7, numbers=numbers)


KERNEL = Cuda()
