"""Dequantize on a CPU with the C++ kernels of csrc/: 4-bit codebooks in bytes, k-bit planes."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inductor_q.csrc import build
from inductor_q.decode.eager import Eager
from inductor_q.formats import QuantFormat
from inductor_q.formats.kbit import BLOCK, KBITS
from inductor_q.kernels.calls import Dequantize
from inductor_q.kernels.nibbles import HIGH_FIRST
from inductor_q.kernels.provider import DENSE_WEIGHT, DequantizeProvider, Launch

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
SOURCE = "dequantize.cpp"
KBIT_SOURCE = "dequantize_kbit.cpp"


class Cpp(DequantizeProvider):
    name = "cpp"

    def missing(self) -> str:
        function = _function()
        return function if isinstance(function, str) else ""

    def unknown(self, fmt: QuantFormat | None) -> str:
        if fmt is None:
            return DENSE_WEIGHT
        if fmt.planes:
            return _unknown_planes(fmt)
        if fmt.nibbles is None or fmt.lut16 is None:
            return f"csrc/{SOURCE} decodes 4-bit codebooks, not {fmt.name}"
        scale = fmt.blockwise
        if scale is None or not (scale.is_float or scale.outer):
            return f"csrc/{SOURCE} does not know the scale of {fmt.name}"
        if scale.outer & (scale.outer - 1):
            return "the nested blocksize is not a power of two"
        return ""

    def refuses(self, call: Dequantize) -> str:
        if refused := self.unknown(call.fmt):
            return refused
        out = call.out
        if out.device.type != "cpu":
            return f"the C++ kernel runs on a CPU, not on {out.device}"
        if out.dtype not in DTYPES:
            return f"output dtype {out.dtype} is not one of float32, bfloat16, float16"
        if out.dim() != 2 or (out.shape[1] > 1 and out.stride(1) != 1):
            return "the output is not a matrix with unit column stride"
        function = _kbit_function() if call.fmt.planes else _function()
        return function if isinstance(function, str) else ""

    def prepare(self, call: Dequantize) -> Launch:
        return functools.partial(_launch_planes if call.fmt.planes else _launch_codes, call.fmt)


def _unknown_planes(fmt: QuantFormat) -> str:
    scale = fmt.blockwise
    per_block = scale is not None and scale.block == BLOCK and not scale.outer
    if fmt.planes not in KBITS or fmt.table is None or not per_block:
        return f"csrc/{KBIT_SOURCE} decodes 2 to 5 bits with a scale per 32, not {fmt.name}"
    return ""


def _launch_codes(fmt: QuantFormat, operands: Sequence[Tensor], out: Tensor) -> None:
    function = _function()
    assert not isinstance(function, str), function
    named = dict(zip(fmt.operands, operands, strict=True))
    scale = fmt.blockwise
    assert scale is not None, f"{fmt.name=}"
    for name, tensor in named.items():
        if name != "qweight" and not (scale.outer and name == scale.operands[0]):
            tensor = tensor.to(torch.float32)  # half-precision scales, as some checkpoints have
        named[name] = tensor.contiguous()  # held until the call returns; most often itself
    scales = [named[name].data_ptr() for name in scale.operands]
    function(
        named["qweight"].data_ptr(),
        _codebook(fmt).ctypes_pointer,
        *(scales if scale.outer else (*scales, None, None, None)),
        scale.outer or 1,
        scale.block,
        out.shape[0],
        out.shape[1],
        out.stride(0),
        int(fmt.nibbles == HIGH_FIRST),
        DTYPES[out.dtype],
        out.data_ptr(),
    )


def _launch_planes(fmt: QuantFormat, operands: Sequence[Tensor], out: Tensor) -> None:
    function = _kbit_function()
    assert not isinstance(function, str), function
    qweight, absmax, codebook = (t.contiguous() for t in operands)
    assert fmt.blockwise is not None, f"{fmt.name=}"
    scale_table = None if fmt.blockwise.is_float else _scale_table(fmt)
    if scale_table is None:
        absmax = absmax.to(torch.float32)
    codebook = codebook.to(torch.float32)
    function(
        qweight.data_ptr(),
        codebook.data_ptr(),
        absmax.data_ptr(),
        None if scale_table is None else scale_table.data_ptr(),
        out.shape[0],
        out.shape[1],
        out.stride(0),
        fmt.planes,
        DTYPES[out.dtype],
        out.data_ptr(),
    )


@functools.cache
def _scale_table(fmt: QuantFormat) -> Tensor:
    """Return the number that each 8-bit scale stands for."""
    assert fmt.blockwise is not None, f"{fmt.name=}"
    return fmt.blockwise.codec.decode(Eager({}), torch.arange(256, dtype=torch.uint8))


class _CodebookArray:
    def __init__(self, values: tuple[float, ...]) -> None:
        self._array = (ctypes.c_float * len(values))(*values)
        self.ctypes_pointer = ctypes.addressof(self._array)


@functools.cache
def _codebook(fmt: QuantFormat) -> _CodebookArray:
    assert fmt.lut16 is not None, f"{fmt.name=}"
    return _CodebookArray(fmt.lut16)


@functools.cache
def _function() -> Any:
    library = build.load(SOURCE)
    if isinstance(library, str):
        return library
    function = library.qfuse_dequantize_4bit
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer] * 6 + [integer] * 5 + [ctypes.c_int] * 2 + [pointer]
    function.restype = None
    return function


@functools.cache
def _kbit_function() -> Any:
    library = build.load(KBIT_SOURCE)
    if isinstance(library, str):
        return library
    function = library.qfuse_dequantize_kbit
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer] * 4 + [integer] * 3 + [ctypes.c_int] * 2 + [pointer]
    function.restype = None
    return function


KERNEL = Cpp()
