"""Describe formats and weights to csrc/linear_rows.cpp, which knows kinds of scales alone."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inductor_q.decode.eager import Eager
from inductor_q.formats import QuantFormat
from inductor_q.formats.codec import Codec, Number
from inductor_q.formats.layout import ROW_MAJOR, Tiles128x4
from inductor_q.formats.minifloat import Minifloat
from inductor_q.formats.scale import (
    FLOAT,
    BlockScale,
    GroupScale,
    NestedScale,
    ProductScale,
    QuotientScale,
    RowScale,
    Scale,
    TensorScale,
)
from inductor_q.kernels import nibbles

#: dtypes by their numbers in csrc/rounding.h, first those that x may have.
FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
DTYPES = {**FLOATS, torch.uint8: 3, torch.int8: 4}
#: What a zero point is there.
NONE, CODE, VALUE = 0, 1, 2
#: The most values that a code may have.
MOST_VALUES = 32
#: The shift that brings every number of a block down to 0.
WHOLE = 63


class Format(ctypes.Structure):
    """`QfuseFormat` of csrc/panel.h."""

    _fields_ = (
        ("block_shift", ctypes.c_int64),
        ("outer_shift", ctypes.c_int64),
        ("planes", ctypes.c_int32),
        ("high_first", ctypes.c_int32),
        ("zero", ctypes.c_int32),
        ("by_row", ctypes.c_int32),
        ("tiled", ctypes.c_int32),
        ("outer_by_row", ctypes.c_int32),
        ("divides", ctypes.c_int32),
        ("values", ctypes.c_int32),
    )


class Weight(ctypes.Structure):
    """`QfuseWeight` of csrc/panel.h."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("zero_point", ctypes.c_void_p),
        ("scale_values", ctypes.c_void_p),
        ("outer", ctypes.c_void_p),
        ("offset", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("scale_dtype", ctypes.c_int32),
        ("zero_dtype", ctypes.c_int32),
        ("adapter_dtype", ctypes.c_int32),
        ("scaling", ctypes.c_float),
    )


@dataclass(frozen=True)
class Scales:
    """The kind of a scale: a number for each block, by which operands it is found.

    by_row, tiled: whether each row begins a block; whether scales lie in tiles of 128 rows.
    outer: what scales are multiplied with, or divided by, `outer_shift` scales' or a row's.
    """

    block: int
    operand: str
    codec: Codec
    by_row: bool = False
    tiled: bool = False
    outer: str = ""
    outer_shift: int = WHOLE
    outer_by_row: bool = False
    divides: bool = False
    offset: str | None = None

    @property
    def table(self) -> str:
        """Name the operand that holds what codes of the scale mean, if one does."""
        return "" if self.codec.table is None else self.codec.table.name


def unknown(fmt: QuantFormat) -> str:
    """Return why the kernel does not know a format; empty if it does."""
    if fmt.nibbles is None and not fmt.planes:
        return f"{fmt.name} is packed neither as nibbles nor as bit planes"
    table = fmt.table
    if fmt.line is None and fmt.lut16 is None and (table is None or table.numel > MOST_VALUES):
        return f"the codes of {fmt.name} have no table of at most {MOST_VALUES} values"
    if scales(fmt) is None:
        return f"the C++ kernel does not know the scale of {fmt.name}"
    return ""


@functools.cache
def scales(fmt: QuantFormat) -> Scales | None:
    """Describe the scales of a format; None where the kernel does not know their kind."""
    found = _scales(fmt.shared[0])
    if found is None or found.block & (found.block - 1):
        return None
    plain = isinstance(found.codec, Number) and found.codec.factor == 1 and not found.outer
    table = found.codec.table  # which the kernel reads at any code of a byte
    whole = table is not None and table.numel == 256
    return found if plain or isinstance(found.codec, Minifloat) or whole else None


def _scales(scale: Scale) -> Scales | None:
    match scale:
        case BlockScale(operand, block, codec):
            return Scales(block, operand, codec)
        case GroupScale(operand, block, codec, layout):
            if layout == ROW_MAJOR or isinstance(layout, Tiles128x4):
                return Scales(block, operand, codec, by_row=True, tiled=layout != ROW_MAJOR)
        case NestedScale(operand, block, codec, outer, offset):
            if outer.codec == FLOAT and not outer.block & (outer.block - 1):
                nested = Scales(block, operand, codec, outer=outer.operand, offset=offset)
                return replace(nested, outer_shift=outer.block.bit_length() - 1)
        case ProductScale(GroupScale() as first, RowScale() | TensorScale() as second):
            found, divides = _scales(first), isinstance(scale, QuotientScale)
            if found is not None and isinstance(second.codec, Number):
                by_row = isinstance(second, RowScale)
                return replace(found, outer=second.operand, outer_by_row=by_row, divides=divides)
    return None


@functools.cache
def format_of(fmt: QuantFormat) -> Format:
    scale = scales(fmt)
    assert scale is not None, f"{fmt.name=}"
    zero = NONE if fmt.line is None else VALUE if fmt.line[0].zero_is_value else CODE
    return Format(
        block_shift=scale.block.bit_length() - 1,
        outer_shift=scale.outer_shift,
        planes=fmt.planes,
        high_first=fmt.nibbles == nibbles.HIGH_FIRST,
        zero=zero,
        by_row=scale.by_row,
        tiled=scale.tiled,
        outer_by_row=scale.outer_by_row,
        divides=scale.divides,
        values=16 if fmt.table is None else fmt.table.numel,
    )


class Holder:
    """Holds what the pointers of weights point to, until a call returns."""

    def __init__(self) -> None:
        self._copies: list[Tensor] = []

    def pointer(self, tensor: Tensor, dtype: torch.dtype | None = None) -> int:
        """Return the address of a tensor's numbers in a row, in `dtype` if that is given."""
        if not tensor.is_contiguous() or dtype not in (None, tensor.dtype):
            tensor = tensor.to(dtype or tensor.dtype).contiguous()
            self._copies.append(tensor)
        return tensor.data_ptr()


def fields_of(fmt: QuantFormat, operands: Mapping[str, Tensor], holder: Holder) -> dict[str, int]:
    """Describe the operands of a weight, as fields of `Weight`."""
    scale = scales(fmt)
    assert scale is not None, f"{fmt.name=}"
    numbers = operands[scale.operand]
    fields = {
        "codes": holder.pointer(operands["qweight"]),
        "scale": holder.pointer(numbers),
        "scale_dtype": DTYPES[numbers.dtype],
    }
    if fmt.table is not None:
        fields["values"] = holder.pointer(operands[fmt.table.name], torch.float32)
    else:
        fields["values"] = _values(fmt).data_ptr()
    if scale.table:
        fields["scale_values"] = holder.pointer(operands[scale.table], torch.float32)
    elif isinstance(scale.codec, Minifloat):
        fields["scale_values"] = _of_codes(scale.codec).data_ptr()
    for field, name in (("outer", scale.outer), ("offset", scale.offset)):
        if name:
            fields[field] = holder.pointer(operands[name], torch.float32)
    if fmt.line is not None:
        (name,) = fmt.line[2].operands
        fields["zero_point"] = holder.pointer(operands[name])
        fields["zero_dtype"] = DTYPES[operands[name].dtype]
    return fields


@functools.cache
def _values(fmt: QuantFormat) -> Tensor:
    """Return the values of 16 codes that a format fixes."""
    numbers = fmt.lut16 if fmt.line is None else fmt.line[0].numbers
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")


@functools.cache
def _of_codes(codec: Minifloat) -> Tensor:
    """Return the values of all codes of 8 bits."""
    codes = torch.arange(256, dtype=torch.int32, device="cpu").to(torch.uint8)
    return codec.decode(Eager({}), codes).contiguous()
