"""The CUDA sources that multiply a few rows with packed weights: their formats and memory."""

from __future__ import annotations

import functools
import struct
from typing import NamedTuple, Protocol

import torch

from inductor_q.formats import QuantFormat
from inductor_q.kernels import dequantize_cuda, nibbles
from inductor_q.kernels.dequantize_cuda import TYPES, VECTOR_BYTES, scale_type

#: Sizes of csrc/linear_rows.cuh: threads, rows of a strip and of x of an mma, weights of a launch.
THREADS, STRIP, TOKENS, WEIGHTS = 512, 16, 8, 4
WARPS = THREADS // 32
#: Where the look-up table is in shared memory, and the bytes in front of it that others may have.
TABLE, LOW = 64 << 10, 63 << 10
OUTER = 256  # scales that share an outer one


class Plan(NamedTuple):
    """How a source serves a call.

    height: strips of a tile. places: where strips, sums and rows of B are in shared memory, and
    what a source needs besides, in bytes from the look-up table on. shared: the bytes of it all.
    """

    height: int
    places: tuple[int, ...]
    shared: int


class Source(Protocol):
    """A file of csrc/ with a kernel `linear`, for formats that have their codes packed alike."""

    name: str
    chunk: int  # columns: a weight has some times as many

    def unknown(self, fmt: QuantFormat) -> str:
        """Return why it takes no weights in a format; empty where it does."""
        ...

    def takes(self, fmt: QuantFormat, operand: str) -> tuple[torch.dtype, ...]:
        """Return the dtypes that an operand may have; the last is the one to ask for."""
        ...

    def kernel(
        self, fmt: QuantFormat, dtype: torch.dtype, count: int, gated: bool, height: int
    ) -> str:
        """Name the specialization that serves `count` rows of x."""
        ...

    def plan(self, fmt: QuantFormat, count: int, room: int, most: int, height: int) -> Plan | None:
        """Plan for `count` rows of x, rows of B of `room` bytes, and `most` bytes of shared memory;
        return None where they do not fit."""
        ...

    def numbers(self, fmt: QuantFormat, dtype: torch.dtype) -> tuple[int, ...]:
        """Return what else of a format is among the arguments."""
        ...

    def in_order(self, fmt: QuantFormat) -> tuple[str | None, ...]:
        """Return the operands in the order of `Weight`."""
        ...


class Nibbles(Source):
    """Nibbles of a codebook that the format fixes, under a scale for some times 64 neighbours."""

    name = "linear_rows.cu"
    chunk = 64

    def unknown(self, fmt: QuantFormat) -> str:
        if refused := nibbles.refuses(fmt):
            return refused
        scale = fmt.blockwise
        if scale is None or scale.block % self.chunk:
            return f"{fmt.name} has not one scale for each {self.chunk} neighbours"
        if not scale.is_float and scale.outer != OUTER:
            return f"csrc/{self.name} does not know the scale of {fmt.name}"
        return ""

    def takes(self, fmt: QuantFormat, operand: str) -> tuple[torch.dtype, ...]:
        return torch.uint8, torch.float32

    def kernel(
        self, fmt: QuantFormat, dtype: torch.dtype, count: int, gated: bool, height: int
    ) -> str:
        assert fmt.blockwise is not None
        scale, together = "Plain" if fmt.blockwise.is_float else "Nested", -(-count // TOKENS)
        return f"linear<{TYPES[dtype]}, {scale}, {together}, {str(gated).lower()}, {height}>"

    def plan(self, fmt: QuantFormat, count: int, room: int, most: int, height: int) -> Plan | None:
        rows = STRIP * height
        sums = 2 * WARPS * count * (rows + 4) * 4
        sizes = (WARPS * STRIP * 128, sums, 3 * rows * room, WEIGHTS * (1024 + 4))
        return placed(height, sizes, 64 << 10, most)

    def numbers(self, fmt: QuantFormat, dtype: torch.dtype) -> tuple[int, ...]:
        assert fmt.blockwise is not None
        return (fmt.blockwise.block // self.chunk).bit_length() - 1, *_codebook(fmt, dtype)

    def in_order(self, fmt: QuantFormat) -> tuple[str | None, ...]:
        assert fmt.blockwise is not None
        absmax, *nested = fmt.blockwise.operands
        return ("qweight", absmax, *nested, *[None] * (3 - len(nested)))


class Planes(Source):
    """Bit planes in blocks of 32, each with a scale, of a codebook that is an operand."""

    name = "linear_rows_kbit.cu"
    chunk = 128
    own = 2  # rows of x up to which each lane has a block of its own

    def unknown(self, fmt: QuantFormat) -> str:
        return dequantize_cuda.KERNEL.unknown(fmt)

    def takes(self, fmt: QuantFormat, operand: str) -> tuple[torch.dtype, ...]:
        assert fmt.table is not None and fmt.blockwise is not None
        if operand == fmt.table.name:
            return (torch.float32,)
        if operand in fmt.blockwise.operands:
            return tuple(getattr(torch, name) for name in fmt.blockwise.codec.dtypes)
        return (torch.int32,)

    def kernel(
        self, fmt: QuantFormat, dtype: torch.dtype, count: int, gated: bool, height: int
    ) -> str:
        assert fmt.blockwise is not None
        types = f"{TYPES[dtype]}, {fmt.planes}, {scale_type(fmt.blockwise.codec)}"
        together = 0 if count <= self.own else -(-count // TOKENS)
        return f"linear<{types}, {together}, {str(gated).lower()}, {height}>"

    def plan(self, fmt: QuantFormat, count: int, room: int, most: int, height: int) -> Plan | None:
        assert fmt.blockwise is not None
        rows, k = STRIP * height, fmt.planes
        scale = getattr(torch, fmt.blockwise.codec.dtypes[0]).itemsize
        sizes = (
            WARPS * STRIP * (32 * k + 16),
            (1 if count > TOKENS else 2) * WARPS * count * (rows + 4) * 4,
            3 * rows * room,
            WARPS * rows * 8 * scale,
            WARPS * rows * 32,
        )
        return placed(height, sizes, {3: 16 << 10, 5: 128 << 10}.get(k, 64 << 10), most)

    def numbers(self, fmt: QuantFormat, dtype: torch.dtype) -> tuple[int, ...]:
        return ()

    def in_order(self, fmt: QuantFormat) -> tuple[str | None, ...]:
        assert fmt.blockwise is not None and fmt.table is not None
        return "qweight", *fmt.blockwise.operands, fmt.table.name, None, None


@functools.cache
def placed(height: int, sizes: tuple[int, ...], table: int, most: int) -> Plan | None:
    """Place so many bytes in front of a table or behind it; return None where they do not fit."""
    ends, limits = [-LOW, table], [0, most - TABLE]
    if limits[1] < table:
        return None
    places = dict.fromkeys(range(len(sizes)), 0)
    for i in sorted(places, key=lambda i: -sizes[i]):
        fits = [side for side in (0, 1) if ends[side] + sizes[i] <= limits[side]]
        if not fits:
            return None
        places[i] = ends[fits[0]]
        ends[fits[0]] += sizes[i] + -sizes[i] % VECTOR_BYTES
    return Plan(height, tuple(places.values()), TABLE + ends[1])


@functools.cache
def _codebook(fmt: QuantFormat, dtype: torch.dtype) -> tuple[int, ...]:
    """Return 16 values, four a word, and what undoes their stretch."""
    assert fmt.lut16 is not None
    values, stretch = nibbles.fit(fmt.lut16, dtype)
    return (*values.view(torch.int64).tolist(), bits(1 / stretch))


def bits(value: float) -> int:
    """Return the bits of a float32 as an integer."""
    (found,) = struct.unpack("<i", struct.pack("<f", value))
    return int(found)


NIBBLES, PLANES = Nibbles(), Planes()


def source_of(fmt: QuantFormat) -> Source:
    """Return the source that may take weights in a format."""
    return PLANES if fmt.planes else NIBBLES
