"""Lower `qfuse::dequantize` to loop IR that fuses, or to a kernel that writes into any buffer.

Provider "inductor" is `Pointwise` IR: the decode joins the kernel of its neighbours (casts,
transposes, a concatenation), at one lane per element. The kernels of `inductor_q.kernels` read each
packed word once, which is faster (benchmarks/results), and become an `ExternKernelOut` with a
flexible layout: inside a concatenation they write straight into its buffer, at its row stride.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch._inductor import ir, lowering
from torch._inductor.virtualized import V, ops

from inductor_q.decode.loops import Loops
from inductor_q.formats import QuantFormat, get_format
from inductor_q.kernels.dequantize import POINTWISE, compiled_by, not_callable, refusal
from inductor_q.kernels.provider import warn_passed_over
from inductor_q.lowerings.in_force import in_force
from inductor_q.lowerings.kernel_out import KernelOut

OP = "dequantize"


def register() -> None:
    lowering.register_lowering(torch.ops.qfuse.dequantize.default, type_promotion_kind=None)(lower)


def lower(
    operands: Sequence[Any], format: str, shape: Sequence[int], dtype: torch.dtype
) -> ir.TensorBox:
    fmt = get_format(format)
    device = operands[0].get_device()
    wanted = in_force().kernel(OP)
    barred = not_callable(shape, V.graph.cpp_wrapper)
    provider = compiled_by(device.type, wanted, fmt, barred)
    if wanted not in ("auto", provider):
        warn_passed_over(OP, wanted, barred or refusal(device.type, wanted, fmt))
    in_force().count_provider(OP, provider)
    if provider == POINTWISE:
        return pointwise(operands, fmt, shape, dtype)
    return extern(operands, fmt, shape, dtype, provider)


def pointwise(
    operands: Sequence[Any], fmt: QuantFormat, shape: Sequence[int], dtype: torch.dtype
) -> ir.TensorBox:
    """Express the decode as loop IR."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    device = operands[0].get_device()
    loops = loops_over(operands, fmt, shape)

    def inner(index: Sequence[sympy.Expr]) -> Any:
        i = sum((x * s for x, s in zip(index, strides, strict=True)), sympy.S.Zero)
        return ops.to_dtype(fmt.decode(loops, i), dtype)

    return ir.Pointwise.create(device=device, dtype=dtype, inner_fn=inner, ranges=list(shape))


def loops_over(operands: Sequence[Any], fmt: QuantFormat, shape: Sequence[Any]) -> Loops:
    """Make the interpreter of a decode that loads these operands of a weight of `shape`."""
    loaders = {
        name: _flat(_units(operand, fmt) if name == "qweight" else operand).make_loader()
        for name, operand in zip(fmt.operands, operands, strict=True)
    }
    columns, rows = shape[-1] if shape else 1, math.prod(shape[:-1])
    return Loops(loaders, operands[0].get_device().type, columns, rows)


def _units(x: Any, fmt: QuantFormat) -> Any:
    """View the packed weight as its units, whatever dtype they are stored in."""
    unit = getattr(torch, fmt.packing.unit)
    return x if x.get_dtype() is unit else lowering.lowerings[torch.ops.aten.view.dtype](x, unit)


def _flat(x: Any) -> Any:
    return x if len(x.get_size()) == 1 else lowering.view(x, [-1])


class DequantizeOut(KernelOut):
    def codegen_args(self) -> list[str]:
        return [f"[{', '.join(self.references())}]", *map(repr, self.constant_args)]


def extern(
    operands: Sequence[Any],
    fmt: QuantFormat,
    shape: Sequence[int],
    dtype: torch.dtype,
    provider: str,
) -> ir.TensorBox:
    """Express the decode as one kernel call into a buffer whose place is not decided yet."""
    realized = [ir.ExternKernel.realize_input(x) for x in operands]
    layout = ir.FlexibleLayout(device=operands[0].get_device(), dtype=dtype, size=list(shape))
    node = DequantizeOut(
        layout=layout,
        inputs=realized,
        constant_args=(fmt.name, provider),
        python_kernel_name="qfuse_dequantize",
        op_overload=torch.ops.qfuse.dequantize.out,
    )
    return ir.TensorBox.create(node)
