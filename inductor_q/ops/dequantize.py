"""`qfuse::dequantize`: a packed weight's values.

In a trace it is one op node; in eager mode the function calls its kernel directly, with no dispatch
in between. The first provider of the device's list that does not refuse the call serves it
(`inductor_q.kernels`), on the current stream, without a host synchronization; the launch that it
prepares serves all calls like this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from inductor_q.exc import WrongDtype, WrongShape
from inductor_q.formats import get_format
from inductor_q.kernels.checks import check_operands
from inductor_q.kernels.dequantize import PREPARED, write
from inductor_q.ops.library import define, define_autograd

SCHEMA = "(Tensor[] operands, str format, SymInt[] shape, ScalarType dtype"


def dequantize(
    operands: Sequence[Tensor], format: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return the values of a quantized weight.

    Args:
        operands: the tensors that `FORMATS[format].operands` names, in that order, as
            `FORMATS[format].requirements(shape)` describes them.
        format: a name in `inductor_q.FORMATS`, for example "nf4_b64_nested".
        shape: the weight's logical shape, row major.
        dtype: float32, bfloat16 or float16; values are computed in float32 and rounded once.

    Returns:
        A contiguous tensor of `shape` and `dtype`.

    Raises:
        UnknownFormat, CorruptQuantState, WrongDtype: see each message for the way out.
    """
    if torch.compiler.is_compiling() or _is_traced(operands):
        result: Tensor = torch.ops.qfuse.dequantize(list(operands), format, list(shape), dtype)
        return result
    return _dequantize(operands, format, shape, dtype)


_TRACERS = tuple(
    getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "FUNCTIONAL", "PROXY")
)


def _is_traced(operands: Sequence[Tensor]) -> bool:
    """Whether fake tensors or `make_fx` trace outside of Dynamo, or `torch.func` transforms the
    caller: they need an op, and what is allocated among them lacks data."""
    if torch._C._are_functorch_transforms_active():
        return True
    if torch._C._len_torch_dispatch_stack() > 0 and any(
        torch._C._get_dispatch_mode(key) is not None for key in _TRACERS
    ):
        return True
    return any(isinstance(t, (FakeTensor, FunctionalTensor)) for t in operands)


def _dequantize(
    operands: Sequence[Tensor], format: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    fmt = get_format(format)
    PREPARED.check(operands, fmt, shape, dtype)
    out = torch.empty(tuple(shape), dtype=dtype, device=operands[0].device)
    if numel := out.numel():
        cols = out.shape[-1] if shape else 1
        write(operands, fmt, out if len(shape) == 2 else out.view(numel // cols, cols))
    return out


def _dequantize_out(
    operands: Sequence[Tensor],
    format: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    out: Tensor,
) -> Tensor:
    fmt = get_format(format)
    check_operands(operands, fmt, shape, dtype)
    if tuple(out.shape) != tuple(shape) or out.dim() != 2:
        raise WrongShape(what="out", expected=tuple(shape), got=tuple(out.shape))
    if out.dtype != dtype:
        raise WrongDtype(what="out", expected=(dtype,), got=out.dtype)
    write(operands, fmt, out)
    return out


def _fake(
    operands: Sequence[Tensor], format: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    check_operands(operands, get_format(format), shape, dtype)
    return operands[0].new_empty(tuple(shape), dtype=dtype)


def _fake_out(
    operands: Sequence[Tensor],
    format: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    out: Tensor,
) -> Tensor:
    return out


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.n_operands = len(inputs[0])


def _no_gradient(ctx: Any, grad: Tensor) -> tuple[list[None], None, None, None]:
    return [None] * ctx.n_operands, None, None, None  # a quantized weight is frozen


def define_dequantize() -> None:
    define(f"dequantize{SCHEMA}) -> Tensor", _dequantize, _fake)
    define_autograd("dequantize", _no_gradient, _setup_context)
    define(f"dequantize.out{SCHEMA}, *, Tensor(a!) out) -> Tensor(a!)", _dequantize_out, _fake_out)
