"""Multiply a few rows with packed 4-bit weights on a CPU, with the C++ of csrc/linear_rows.cpp.

Weights are read once, as they are stored, and never written as values: the 16 values of a block,
scaled, are a table in registers. Sums are float32 and rounded once, with bias and adapter.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from inductor_q.csrc import build
from inductor_q.formats import QuantFormat
from inductor_q.kernels import nibbles
from inductor_q.kernels.linear_rows_cuda import MOST_ROWS
from inductor_q.kernels.provider import DENSE_WEIGHT, Provider
from inductor_q.kernels.rows_calls import LinearRows

SOURCE = "linear_rows.cpp"
#: dtypes by their numbers in csrc/rounding.h and csrc/linear_rows.cpp, first those that x may have.
FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
DTYPES = {**FLOATS, torch.uint8: 3, torch.int8: 4}
#: What a zero point is there.
NONE, CODE, VALUE = 0, 1, 2


class _Format(ctypes.Structure):
    """`QfuseFormat` of csrc/linear_rows.cpp."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("block_shift", ctypes.c_int64),
        ("nested_shift", ctypes.c_int64),
        ("high_first", ctypes.c_int32),
        ("zero", ctypes.c_int32),
    )


class _Weight(ctypes.Structure):
    """`QfuseWeight` of csrc/linear_rows.cpp."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("zero_point", ctypes.c_void_p),
        ("nested_codebook", ctypes.c_void_p),
        ("nested_absmax", ctypes.c_void_p),
        ("nested_offset", ctypes.c_void_p),
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


class Cpp(Provider[LinearRows]):
    name = "cpp"

    def missing(self) -> str:
        function = _function()
        return function if isinstance(function, str) else ""

    def unknown(self, fmt: QuantFormat | None) -> str:
        if fmt is None:
            return DENSE_WEIGHT
        if fmt.line is not None:
            return ""
        if refused := nibbles.refuses(fmt):
            return refused
        scale = fmt.blockwise
        if scale is None or not (scale.is_float or scale.outer):
            return f"csrc/{SOURCE} does not know the scale of {fmt.name}"
        if scale.block & (scale.block - 1) or scale.outer & (scale.outer - 1):
            return f"a blocksize of {fmt.name} is not a power of two"
        return ""

    def refuses(self, call: LinearRows) -> str:
        if refused := self.unknown(call.fmt):
            return refused
        x = call.x
        if x.device.type != "cpu":
            return f"the C++ kernel runs on a CPU, not on {x.device}"
        if x.dtype not in FLOATS:
            return f"x is {x.dtype}, not float32, bfloat16 or float16"
        if x.shape[0] > MOST_ROWS:
            return f"{x.shape[0]} rows, more than {MOST_ROWS}"
        columns = x.shape[1]
        if call.fmt.line is not None and columns % (group := call.fmt.line[1].block):
            return f"{columns} columns, which are no multiple of a group of {group}"
        for adapter in call.adapters:
            if adapter is not None and not {adapter.a.dtype, adapter.b.dtype} <= set(FLOATS):
                return f"an adapter is {adapter.a.dtype} and {adapter.b.dtype}, not of floats"
        return ""

    def run(self, call: LinearRows) -> list[Tensor]:
        function = _function()
        assert not isinstance(function, str), function
        x, outputs = call.x.contiguous(), call.outputs()
        held: list[Tensor] = []  # what the pointers point to
        weights = (_Weight * len(call.weights))(
            *(_weight(call, i, outputs, held) for i in range(len(call.weights)))
        )
        function(
            ctypes.byref(_format(call.fmt)),
            weights,
            len(weights),
            x.data_ptr(),
            *x.shape,
            call.fmt.group(x.shape[1]),
            FLOATS[x.dtype],
            call.gated,
        )
        return outputs


def _weight(call: LinearRows, i: int, outputs: list[Tensor], held: list[Tensor]) -> _Weight:
    """Describe the i-th weight; `held` keeps copies until the call returns."""

    def pointer(tensor: Tensor, dtype: torch.dtype | None = None) -> int:
        if not tensor.is_contiguous() or dtype not in (None, tensor.dtype):
            tensor = tensor.to(dtype or tensor.dtype).contiguous()
            held.append(tensor)
        return tensor.data_ptr()

    operands = dict(zip(call.fmt.operands, call.weights[i], strict=True))
    first, *others = _scales(call.fmt)
    fields = {
        "codes": pointer(operands["qweight"]),
        "out": outputs[0 if call.gated else i].data_ptr(),
        "rows": call.features[i],
        "scale": pointer(operands[first]),
        "scale_dtype": DTYPES[operands[first].dtype],
    }
    if call.fmt.line is not None:
        fields["zero_point"] = pointer(operands[others[0]])
        fields["zero_dtype"] = DTYPES[operands[others[0]].dtype]
    elif others:
        for field, name in zip(("codebook", "absmax", "offset"), others, strict=True):
            fields[f"nested_{field}"] = pointer(operands[name], torch.float32)
    bias, adapter = call.biases[i], call.adapters[i]
    if bias is not None:
        fields["bias"] = pointer(bias)
    if adapter is not None:
        dtype = adapter.a.dtype
        if adapter.b.dtype is not dtype:
            dtype = torch.promote_types(dtype, adapter.b.dtype)
        fields["a"], fields["b"] = pointer(adapter.a, dtype), pointer(adapter.b, dtype)
        fields["rank"], fields["adapter_dtype"] = adapter.a.shape[0], FLOATS[dtype]
    return _Weight(**fields, scaling=0.0 if adapter is None else adapter.scaling)


@functools.cache
def _scales(fmt: QuantFormat) -> tuple[str, ...]:
    """Name the operands of a scale, and behind it what nests it or the zero points."""
    if fmt.line is not None:
        _, scale, zero = fmt.line
        return (*scale.operands, *zero.operands)
    assert fmt.blockwise is not None, f"{fmt.name=}"
    return fmt.blockwise.operands


@functools.cache
def _format(fmt: QuantFormat) -> _Format:
    if fmt.line is not None:
        line, scale, _ = fmt.line
        numbers, zero = line.numbers, VALUE if line.zero_is_value else CODE
    else:
        assert fmt.lut16 is not None and fmt.blockwise is not None, f"{fmt.name=}"
        numbers, zero, scale = fmt.lut16, NONE, fmt.blockwise
    values = (ctypes.c_float * 16)(*numbers)
    found = _Format(
        values=ctypes.addressof(values),
        block_shift=scale.block.bit_length() - 1,
        nested_shift=(scale.outer or 1).bit_length() - 1,
        high_first=fmt.nibbles == nibbles.HIGH_FIRST,
        zero=zero,
    )
    found.held = values  # the structure has their address only
    return found


@functools.cache
def _function() -> Any:
    library = build.load(SOURCE, with_torch=True)
    if isinstance(library, str):
        return library
    function = library.qfuse_linear_rows
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer, pointer, integer, pointer, *[integer] * 3, *[ctypes.c_int] * 2]
    function.restype = None
    return function


KERNEL = Cpp()
