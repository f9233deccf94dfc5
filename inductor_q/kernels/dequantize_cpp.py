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
from inductor_q.formats.codec import Codebook, Table
from inductor_q.formats.kbit import KBITS
from inductor_q.formats.packing import BitPlanes, BytePacking
from inductor_q.formats.scale import BlockScale, MinifloatScale, NestedScale
from inductor_q.kernels.kernel import DequantizeKernel, Launch

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
SOURCE = "dequantize.cpp"
KBIT_SOURCE = "dequantize_kbit.cpp"


class Cpp(DequantizeKernel):
    name = "cpp"

    def available(self) -> str:
        """Empty when this machine can run the kernel, else the reason why not."""
        function = _function()
        return function if isinstance(function, str) else ""

    def decodes(self, fmt: QuantFormat) -> str:
        if isinstance(fmt.packing, BitPlanes):
            return _decodes_planes(fmt)
        packed = isinstance(fmt.packing, BytePacking) and fmt.packing.bits == 4
        if not packed or not isinstance(fmt.codec, Codebook):
            return f"csrc/{SOURCE} decodes 4-bit codebooks, not {fmt.name}"
        if not isinstance(fmt.scale, (BlockScale, NestedScale)):
            return f"csrc/{SOURCE} does not know the scale of {fmt.name}"
        if isinstance(fmt.scale, NestedScale) and fmt.scale.outer.block & (
            fmt.scale.outer.block - 1
        ):
            return "the nested blocksize is not a power of two"
        return ""

    def supports(self, operands: Sequence[Tensor], fmt: QuantFormat, out: Tensor) -> str:
        if refused := self.decodes(fmt):
            return refused
        if out.device.type != "cpu":
            return f"the C++ kernel runs on a CPU, not on {out.device}"
        if out.dtype not in DTYPES:
            return f"output dtype {out.dtype} is not one of float32, bfloat16, float16"
        if out.dim() != 2 or (out.shape[1] > 1 and out.stride(1) != 1):
            return "the output is not a matrix with unit column stride"
        function = _kbit_function() if isinstance(fmt.packing, BitPlanes) else _function()
        return function if isinstance(function, str) else ""

    def prepare(self, operands: Sequence[Tensor], fmt: QuantFormat, out: Tensor) -> Launch:
        planes = isinstance(fmt.packing, BitPlanes)
        return functools.partial(_launch_planes if planes else _launch_codes, fmt)


def _decodes_planes(fmt: QuantFormat) -> str:
    scaled = isinstance(fmt.scale, (BlockScale, MinifloatScale))
    whole = scaled and fmt.scale.block == BitPlanes.block
    if fmt.packing.bits not in KBITS or not isinstance(fmt.codec, Table) or not whole:
        return f"csrc/{KBIT_SOURCE} decodes 2 to 5 bits with a scale per 32, not {fmt.name}"
    return ""


def _launch_codes(fmt: QuantFormat, operands: Sequence[Tensor], out: Tensor) -> None:
    function = _function()
    assert not isinstance(function, str), function
    named = dict(zip(fmt.operands, operands, strict=True))
    packing, scale = fmt.packing, fmt.scale
    assert isinstance(packing, BytePacking), f"{fmt.name=}"
    nested = isinstance(scale, NestedScale)
    for name, tensor in named.items():
        if name != "qweight" and not (nested and name == "absmax"):
            tensor = tensor.to(torch.float32)  # half-precision scales, as some checkpoints have
        named[name] = tensor.contiguous()  # held until the call returns; most often itself
    pointers = {name: tensor.data_ptr() for name, tensor in named.items()}
    function(
        pointers["qweight"],
        _codebook(fmt).ctypes_pointer,
        pointers["absmax"],
        pointers.get("nested_codebook"),
        pointers.get("nested_absmax"),
        pointers.get("nested_offset"),
        scale.outer.block if isinstance(scale, NestedScale) else 1,
        scale.block,
        out.shape[0],
        out.shape[1],
        out.stride(0),
        int(packing.high_first),
        DTYPES[out.dtype],
        out.data_ptr(),
    )


def _launch_planes(fmt: QuantFormat, operands: Sequence[Tensor], out: Tensor) -> None:
    function = _kbit_function()
    assert not isinstance(function, str), function
    qweight, absmax, codebook = (t.contiguous() for t in operands)
    scale_table = _scale_table(fmt.scale) if isinstance(fmt.scale, MinifloatScale) else None
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
        fmt.packing.bits,
        DTYPES[out.dtype],
        out.data_ptr(),
    )


@functools.cache
def _scale_table(scale: MinifloatScale) -> Tensor:
    """What each 8-bit scale stands for."""
    codes = torch.arange(256, dtype=torch.uint8)
    values: Tensor = scale.decode(Eager({scale.operand: codes}), codes.long() * scale.block)
    return values


class _CodebookArray:
    def __init__(self, values: tuple[float, ...]) -> None:
        self._array = (ctypes.c_float * len(values))(*values)
        self.ctypes_pointer = ctypes.addressof(self._array)


@functools.cache
def _codebook(fmt: QuantFormat) -> _CodebookArray:
    assert isinstance(fmt.codec, Codebook)
    return _CodebookArray(fmt.codec.values)


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
