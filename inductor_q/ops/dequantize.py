"""`qfuse::dequantize`: a packed weight's values.

Traced, it is one op node; in eager mode the function calls its kernel directly, with no dispatch in
between. The first kernel of the device's list that supports the call serves it
(`inductor_q.kernels`), on the current stream, without a host synchronization; what it has prepared
for the call serves all that are like it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from inductor_q.exc import CorruptQuantState, WrongDtype, WrongShape
from inductor_q.formats import QuantFormat, get_format
from inductor_q.formats.operand import FLOATS, Operand
from inductor_q.ops.library import define, define_autograd

if TYPE_CHECKING:
    from inductor_q.kernels.kernel import Launch

log = logging.getLogger("inductor_q")

SCHEMA = "(Tensor[] operands, str format, SymInt[] shape, ScalarType dtype"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_REMEDY = "The state belongs to another weight, blocksize or format: quantize the weight again."


def dequantize(
    operands: Sequence[Tensor], format: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """The values of a quantized weight.

    Args:
        operands: the tensors that `FORMATS[format].operands` names, in that order, as
            `FORMATS[format].requirements(numel)` describes them.
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
    """Outside of Dynamo: fake tensors and `make_fx`, which must see an op and have no data."""
    if torch._C._len_torch_dispatch_stack() > 0 and any(
        torch._C._get_dispatch_mode(key) is not None for key in _TRACERS
    ):
        return True
    return any(isinstance(t, (FakeTensor, FunctionalTensor)) for t in operands)


def check_operands(
    operands: Sequence[Tensor], fmt: QuantFormat, shape: Sequence[int], dtype: torch.dtype
) -> None:
    """Raise unless `operands` can hold a weight of `shape` in format `fmt`."""
    if dtype not in DTYPES:
        raise WrongDtype(what="dequantized weight", expected=DTYPES, got=dtype)
    if len(operands) != len(fmt.operands):
        raise CorruptQuantState(
            what=f"number of operands of {fmt.name}",
            expected=f"{len(fmt.operands)} ({', '.join(fmt.operands)})",
            got=len(operands),
            remedy="Pass the operands in the order of FORMATS[format].operands.",
        )
    devices = {t.device for t in operands}
    if len(devices) > 1:
        raise CorruptQuantState(
            what=f"device of the operands of {fmt.name}",
            expected="one device",
            got=", ".join(
                f"{n} on {t.device}" for n, t in zip(fmt.operands, operands, strict=True)
            ),
            remedy="Move the quantization state with the weight: module.to(device).",
        )
    numel = math.prod(shape)
    for operand, tensor in zip(fmt.requirements(numel), operands, strict=True):
        if operand.dtypes:
            _check_typed(operand, tensor)
        else:
            _check_bytes(operand, tensor, shape)


def _check_once(
    operands: Sequence[Tensor], fmt: QuantFormat, shape: Sequence[int], dtype: torch.dtype
) -> None:
    """`check_operands` of real tensors, not again where operands like these have passed."""
    found = [(t.dtype, t.numel(), t.device) for t in operands]
    key = (fmt, tuple(shape), dtype, *found)
    if key not in _checked:
        check_operands(operands, fmt, shape, dtype)
        if len(_checked) >= KEPT:
            _checked.clear()
        _checked.add(key)


#: Kinds of calls that are remembered: many models' weights. With more all are forgotten, and come
#: back.
KEPT = 4096
_checked: set[tuple[Any, ...]] = set()


def _check_bytes(operand: Operand, tensor: Tensor, shape: Sequence[int]) -> None:
    packed = tensor.numel() * tensor.element_size()
    # A wider storage dtype may round the byte count up to its own size.
    if not operand.numel <= packed < operand.numel + tensor.element_size():
        raise CorruptQuantState(
            what="packed weight",
            expected=f"{operand.numel} bytes for shape {tuple(shape)}",
            got=f"{packed} bytes",
            remedy=_REMEDY,
        )


def _check_typed(operand: Operand, tensor: Tensor) -> None:
    if tensor.numel() != operand.numel:
        raise CorruptQuantState(
            what=f"number of elements of {operand.name}",
            expected=operand.numel,
            got=tensor.numel(),
            remedy=_REMEDY,
        )
    dtypes = tuple(getattr(torch, name) for name in operand.dtypes)
    if tensor.dtype in dtypes:
        return
    if operand.dtypes == FLOATS:
        raise WrongDtype(what=operand.name, expected=dtypes, got=tensor.dtype)
    raise CorruptQuantState(  # codes, or a scale that the format promises in one dtype
        what=f"dtype of {operand.name}",
        expected=" or ".join(map(str, dtypes)),
        got=tensor.dtype,
        remedy=_REMEDY,
    )


def _dequantize(
    operands: Sequence[Tensor], format: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    fmt = get_format(format)
    _check_once(operands, fmt, shape, dtype)
    out = torch.empty(tuple(shape), dtype=dtype, device=operands[0].device)
    if numel := out.numel():
        cols = out.shape[-1] if shape else 1
        write(operands, fmt, out if len(shape) == 2 else out.view(numel // cols, cols))
    return out


def write(
    operands: Sequence[Tensor], fmt: QuantFormat, out: Tensor, provider: str = "auto"
) -> None:
    """Write the values into the matrix `out` with the first kernel that supports the call.

    A kernel named by `provider` is asked before the others; where the device has none of that name,
    a warning says so once. Kernels are asked at the first call of a kind; what the one that serves
    it has prepared is launched again for those that `DequantizeKernel` counts as like it.
    """
    key = (
        *(fmt, provider, out.device, out.dtype, out.shape, out.stride(), out.data_ptr() % 16),
        *[(t.dtype, t.is_contiguous(), t.data_ptr() % 16) for t in operands],
    )
    launch = _launches.get(key)
    if launch is None:
        if len(_launches) >= KEPT:
            _launches.clear()
        launch = _launches[key] = _prepare(operands, fmt, out, provider)
    launch(operands, out)


_launches: dict[tuple[Any, ...], Launch] = {}


def _prepare(operands: Sequence[Tensor], fmt: QuantFormat, out: Tensor, provider: str) -> Launch:
    from inductor_q.kernels import candidates  # kernels sit above ops

    if out.numel() == 0:
        return _nothing
    kernels = candidates("dequantize", out.device.type, provider)
    if provider != "auto" and kernels[0].name != provider:
        tell_once(provider, f"there is none of that name for {out.device.type} tensors")
    for kernel in kernels:
        reason = kernel.supports(operands, fmt, out)
        if not reason:
            return kernel.prepare(operands, fmt, out)
        if not kernel.decodes(fmt):  # a kernel for other formats is no news
            tell_once(kernel.name, reason)
    raise AssertionError("the reference kernel serves every call")


def _nothing(operands: Sequence[Tensor], out: Tensor) -> None:
    """Of no elements."""


_told: set[tuple[str, str]] = set()


def tell_once(kernel: str, reason: str) -> None:
    """Warn that a kernel was passed over, once for each reason."""
    if (kernel, reason) not in _told:
        _told.add((kernel, reason))
        log.warning(
            "dequantize: kernel %r not used: %s; another one serves the call", kernel, reason
        )


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
