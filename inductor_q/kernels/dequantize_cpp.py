"""Dequantize on a CPU with the C++ of csrc/dequantize.cpp, around what is printed of a format.

A format's library is built at the first call that needs it, which takes a second once a machine.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inductor_q.csrc import build
from inductor_q.decode import cpp
from inductor_q.formats import FORMATS, QuantFormat
from inductor_q.kernels.calls import Dequantize
from inductor_q.kernels.provider import DENSE_WEIGHT, DequantizeProvider, Launch

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
SOURCE = "dequantize.cpp"
#: The format that is built to see whether this machine builds any: QLoRA's.
PROBE = FORMATS["nf4_b64_nested"]


class Cpp(DequantizeProvider):
    name = "cpp"

    def missing(self) -> str:
        function = _function(PROBE)
        return function if isinstance(function, str) else ""

    def unknown(self, fmt: QuantFormat | None) -> str:
        return DENSE_WEIGHT if fmt is None else ""

    def refuses(self, call: Dequantize) -> str:
        out = call.out
        if out.device.type != "cpu":
            return f"the C++ kernel runs on a CPU, not on {out.device}"
        if out.dtype not in DTYPES:
            return f"output dtype {out.dtype} is not one of float32, bfloat16, float16"
        if out.dim() != 2 or (out.shape[1] > 1 and out.stride(1) != 1):
            return "the output is not a matrix with unit column stride"
        function = _function(call.fmt)
        return function if isinstance(function, str) else ""

    def prepare(self, call: Dequantize) -> Launch:
        operands, fmt, out = call.operands, call.fmt, call.out
        function, count = _function(fmt), len(operands)
        dtypes = (ctypes.c_int * count)(*[DTYPES.get(t.dtype, -1) for t in operands])
        sizes = (*out.shape, out.stride(0), fmt.group(out.shape[1]), DTYPES[out.dtype])

        def launch(operands: Sequence[Tensor], out: Tensor) -> None:
            held = [t.contiguous() for t in operands]  # until the call returns; most often itself
            pointers = (ctypes.c_void_p * count)(*[t.data_ptr() for t in held])
            function(pointers, dtypes, *sizes, torch.get_num_threads(), out.data_ptr())

        return launch


@functools.cache
def _function(fmt: QuantFormat) -> Any:
    """Return the function for `fmt`, or why there is none."""
    library = build.load(SOURCE, printed=cpp.source(fmt))
    if isinstance(library, str):
        return library
    function = library.qfuse_dequantize
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer, pointer, *[integer] * 4, ctypes.c_int, ctypes.c_int, pointer]
    function.restype = None
    return function


KERNEL = Cpp()
