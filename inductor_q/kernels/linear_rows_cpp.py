"""Multiply a few rows with packed weights on a CPU, with the C++ of csrc/linear_rows.cpp.

Weights are read once, as they are stored, and never written as values: the values of codes are a
table in registers. Sums are float32 and rounded once, with bias and adapter.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from inductor_q.csrc import build
from inductor_q.formats import QuantFormat
from inductor_q.kernels import linear_rows_described as described
from inductor_q.kernels.linear_rows_cuda import MOST_ROWS
from inductor_q.kernels.linear_rows_described import FLOATS, Holder, Weight
from inductor_q.kernels.provider import DENSE_WEIGHT, Provider
from inductor_q.kernels.rows_calls import LinearRows

SOURCE = "linear_rows.cpp"


class Cpp(Provider[LinearRows]):
    name = "cpp"

    def missing(self) -> str:
        function = _function()
        return function if isinstance(function, str) else ""

    def unknown(self, fmt: QuantFormat | None) -> str:
        return DENSE_WEIGHT if fmt is None else described.unknown(fmt)

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
        for adapter in call.adapters:
            if adapter is not None and not {adapter.a.dtype, adapter.b.dtype} <= set(FLOATS):
                return f"an adapter is {adapter.a.dtype} and {adapter.b.dtype}, not of floats"
        return ""

    def run(self, call: LinearRows) -> list[Tensor]:
        function = _function()
        assert not isinstance(function, str), function
        x, outputs = call.x.contiguous(), call.outputs()
        holder = Holder()
        weights = (Weight * len(call.weights))(
            *(_weight(call, i, outputs, holder) for i in range(len(call.weights)))
        )
        function(
            ctypes.byref(described.format_of(call.fmt)),
            weights,
            len(weights),
            x.data_ptr(),
            *x.shape,
            call.fmt.group(x.shape[1]),
            FLOATS[x.dtype],
            call.gated,
        )
        return outputs


def _weight(call: LinearRows, i: int, outputs: list[Tensor], holder: Holder) -> Weight:
    """Describe the i-th weight with what is added to its product."""
    operands = dict(zip(call.fmt.operands, call.weights[i], strict=True))
    fields = described.fields_of(call.fmt, operands, holder)
    fields["out"] = outputs[0 if call.gated else i].data_ptr()
    fields["rows"] = call.features[i]
    bias, adapter = call.biases[i], call.adapters[i]
    if bias is not None:
        fields["bias"] = holder.pointer(bias)
    if adapter is not None:
        dtype = adapter.a.dtype
        if adapter.b.dtype is not dtype:
            dtype = torch.promote_types(dtype, adapter.b.dtype)
        fields["a"], fields["b"] = (holder.pointer(t, dtype) for t in (adapter.a, adapter.b))
        fields["rank"], fields["adapter_dtype"] = adapter.a.shape[0], FLOATS[dtype]
    return Weight(**fields, scaling=0.0 if adapter is None else adapter.scaling)


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
