"""Products in eight bits: each side has its numbers in e4m3 or int8, and a scale for each row.

`x @ W'` of a frozen weight W [N, K] is `scaled_product` of two sides. x is cast with a scale for
each token, found in its row, by torch's own operators (`kernels.rounding`), so that Inductor fuses
the cast into the kernel that produces x. W is decoded straight to eight bits with a scale for each
out-feature (`qfuse::requantize`), which follows from what the row's blocks share
(`qfuse::row_amax`): the weight itself is read once.

A weight that is stored in that dtype already, with a scale for each row or one for all and no zero
point, is taken as it is, with its own scales (`qfuse::row_scale`).

`dY @ W` contracts over out-features, along which the scales of W differ. They are multiplied into
dY before its cast, and W is decoded transposed, as tensor cores want their second operand. A sum of
such products is one in FP8, `[dY1, dY2] @ [W1; W2]`: `requantize` writes several weights, whose
rows are counted in `parts`, side by side, and `row_amax` has their rows below each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from inductor_q.decode.eager import Eager
from inductor_q.formats import QuantFormat, get_format
from inductor_q.formats.codec import Integer
from inductor_q.formats.minifloat import E4M3
from inductor_q.kernels.calls import Requantize
from inductor_q.kernels.checks import check_operands
from inductor_q.kernels.dispatch import serve
from inductor_q.ops.dequantize import dequantize
from inductor_q.ops.library import define

_CODECS = {torch.float8_e4m3fn: E4M3, torch.int8: Integer()}


def unable(compute: str, device: torch.device) -> str:
    """Return why a device has no such products; on a CPU they are emulated."""
    if device.type == "cpu":
        return ""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"products in {compute} were made for NVIDIA GPUs, not for {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if compute == "fp8" and (major, minor) < (8, 9):
        return (
            f"sm_{major}{minor} has no FP8 (sm_89 is the first): qfuse.compute='int8' computes in "
            "eight bits there"
        )
    return ""


def scaled_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return `(a * scale_a) @ (b * scale_b)` in `dtype`.

    Args:
        a: [M, K] in eight bits, with `scale_a` [M, 1].
        b: [K, N] in the dtype of `a`, its columns contiguous, with `scale_b` [1, N] or None for 1.
    """
    if a.dtype is torch.float8_e4m3fn and a.device.type == "cuda":
        if scale_b is None:
            scale_b = torch.ones((1, b.shape[1]), dtype=torch.float32, device=b.device)
        # Hopper accumulates in fewer bits so, and faster: the error is far below that of the casts.
        return torch._scaled_mm(
            a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=True
        )
    if a.dtype is torch.int8:
        total = torch._int_mm(a, b).to(torch.float32)
    else:
        total = a.to(torch.float32) @ b.to(torch.float32)
    total = total * scale_a
    return (total if scale_b is None else total * scale_b).to(dtype)


def _row_amax(
    operands: Sequence[Tensor], format: str, shape: Sequence[int], parts: Sequence[int] = ()
) -> Tensor:
    fmt = get_format(format)
    if parts:
        each = len(fmt.operands)
        own = [operands[i * each : (i + 1) * each] for i in range(len(parts))]
        found = [_row_amax(o, format, [n, shape[1]]) for o, n in zip(own, parts, strict=True)]
        return torch.cat(found)
    check_operands(operands, fmt, shape, torch.float32)
    rows, columns = shape
    if not fmt.largest:
        return dequantize(operands, format, shape, torch.float32).abs().amax(-1)
    index = torch.arange(0, rows * columns, fmt.group(columns), device=operands[0].device)
    scales = fmt.shared[0].decode(Eager(_named(fmt, operands), columns, rows), index)
    return scales.abs().view(rows, -1).amax(-1) * fmt.largest


def stored_codes(
    operands: Sequence[Tensor], format: str, shape: Sequence[int], dtype: torch.dtype
) -> int | None:
    """Return which operand holds the weight's numbers in the dtype, each with its row's scale alone
    and in the order of the elements, if perhaps in another shape or as bytes; None where none does.
    """
    fmt = get_format(format)
    if not fmt.in_bytes or fmt.codec != _CODECS[dtype] or len(fmt.shared) != 1:
        return None
    place = fmt.operands.index("qweight")
    codes, columns = operands[place], shape[-1]
    is_it = (
        codes.element_size() == 1 and codes.numel() == math.prod(shape) and codes.is_contiguous()
    )
    return place if is_it and fmt.group(columns) == columns else None


def _row_scale(operands: Sequence[Tensor], format: str, shape: Sequence[int]) -> Tensor:
    fmt = get_format(format)
    check_operands(operands, fmt, shape, torch.float32)
    rows, columns = shape
    index = torch.arange(0, rows * columns, columns, device=operands[0].device)
    return fmt.shared[0].decode(Eager(_named(fmt, operands), columns, rows), index)


def _named(fmt: QuantFormat, operands: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(fmt.operands, operands, strict=True))


def _fake_of_rows(
    operands: Sequence[Tensor], format: str, shape: Sequence[int], parts: Sequence[int] = ()
) -> Tensor:
    return operands[0].new_empty((shape[0],), dtype=torch.float32)


def _requantize(
    operands: Sequence[Tensor],
    scale: Tensor,
    format: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    transposed: bool,
    parts: Sequence[int] = (),
) -> Tensor:
    fmt = get_format(format)
    out = _fake_requantize(operands, scale, format, shape, dtype, transposed, parts)
    for call in Requantize(operands, fmt, scale, out, transposed).parts(parts):
        rows = len(call.scale)
        check_operands(call.operands, fmt, [rows, *shape[1:]], torch.float32)
        serve("requantize", call)
    return out


def _fake_requantize(
    operands: Sequence[Tensor],
    scale: Tensor,
    format: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    transposed: bool,
    parts: Sequence[int] = (),
) -> Tensor:
    rows, columns = shape
    return scale.new_empty((columns, rows) if transposed else (rows, columns), dtype=dtype)


def define_eight_bits() -> None:
    """Define the ops of weights. They have no gradient: a quantized weight is frozen."""
    define(
        "row_scale(Tensor[] operands, str format, SymInt[] shape) -> Tensor",
        _row_scale,
        _fake_of_rows,
    )
    define(
        "row_amax(Tensor[] operands, str format, SymInt[] shape, SymInt[] parts=[]) -> Tensor",
        _row_amax,
        _fake_of_rows,
    )
    define(
        "requantize(Tensor[] operands, Tensor scale, str format, SymInt[] shape, ScalarType dtype, "
        "bool transposed, SymInt[] parts=[]) -> Tensor",
        _requantize,
        _fake_requantize,
    )
