"""`qfuse::linear`: a quantized linear layer that saves only packed bytes for backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inductor_q.exc import WrongShape
from inductor_q.formats import get_format
from inductor_q.kernels.checks import check_device, check_operands
from inductor_q.kernels.dispatch import serve
from inductor_q.kernels.linear_rows_cuda import MOST_ROWS
from inductor_q.kernels.rows_calls import LinearRows
from inductor_q.ops.dequantize import dequantize
from inductor_q.ops.library import define, define_autograd


def linear(
    x: Tensor,
    operands: Sequence[Tensor],
    format: str,
    shape: Sequence[int],
    bias: Tensor | None = None,
) -> Tensor:
    """Return `x @ dequantize(operands).t() + bias`, computed in the dtype of `x`.

    Args:
        x: [..., K] in float32, bfloat16 or float16.
        operands, format, shape: the weight [N, K], as in `dequantize`.
        bias: [N] or None.

    Returns:
        [..., N] in the dtype of `x`. Gradients reach `x` and `bias`; the backward decodes the
        weight again instead of saving it; inside of `torch.func.grad` and the like it does not.

    Raises:
        WrongShape, WrongDevice: the last dimension of `x` is not K, `bias` is not [N], or one of
            them lies on another device.
    """
    if torch._C._are_functorch_transforms_active():
        # An op with a formula for its gradient knows neither torch.func.grad nor vmap.
        check_input(x, operands, shape, bias)
        weight = dequantize(operands, format, shape, x.dtype)
        return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
    result: Tensor = torch.ops.qfuse.linear(x, list(operands), format, list(shape), bias)
    return result


def check_input(
    x: Tensor, operands: Sequence[Tensor], shape: Sequence[int], bias: Tensor | None
) -> None:
    if len(shape) != 2 or x.dim() == 0 or x.shape[-1] != shape[1]:
        raise WrongShape(
            what="input of a quantized linear layer",
            expected=("...", shape[-1]),
            got=tuple(x.shape),
        )
    check_device("quantized weight", operands, x)
    if bias is not None:
        check_device("bias", [bias], x)
        if tuple(bias.shape) != (shape[0],):
            raise WrongShape(what="bias", expected=(shape[0],), got=tuple(bias.shape))


def _linear(
    x: Tensor, operands: Sequence[Tensor], format: str, shape: Sequence[int], bias: Tensor | None
) -> Tensor:
    check_input(x, operands, shape, bias)
    return compute(x, operands, format, shape, bias)


def compute(
    x: Tensor, operands: Sequence[Tensor], format: str, shape: Sequence[int], bias: Tensor | None
) -> Tensor:
    """Compute the op of checked arguments: a few rows from packed bytes, more by decoding first."""
    bias = None if bias is None else bias.to(x.dtype)
    if has_few_rows(x):
        rows, features = x.reshape(-1, x.shape[-1]), shape[0]
        check_operands(operands, get_format(format), shape, x.dtype)
        call = LinearRows(rows, [operands], get_format(format), [features], [bias], [None])
        result: Tensor = serve("linear_rows", call)[0]
        return result.view(*x.shape[:-1], features)
    weight = torch.ops.qfuse.dequantize(operands, format, shape, x.dtype)
    return torch.nn.functional.linear(x, weight, bias).contiguous()


def has_few_rows(x: Tensor) -> bool:
    return 0 < x.numel() <= MOST_ROWS * x.shape[-1]


def _fake(
    x: Tensor, operands: Sequence[Tensor], format: str, shape: Sequence[int], bias: Tensor | None
) -> Tensor:
    check_input(x, operands, shape, bias)
    return x.new_empty((*x.shape[:-1], shape[0]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, operands, ctx.format, ctx.shape, bias = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(*operands)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    grad_x = grad_bias = None
    operands = list(ctx.saved_tensors)  # once: under a checkpoint each access computes again
    if ctx.needs_input_grad[0]:
        weight = torch.ops.qfuse.dequantize(operands, ctx.format, ctx.shape, grad.dtype)
        grad_x = grad @ weight
    if ctx.needs_input_grad[4]:
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=ctx.bias_dtype)
    return grad_x, [None] * len(operands), None, None, grad_bias


def define_linear() -> None:
    define(
        "linear(Tensor x, Tensor[] operands, str format, SymInt[] shape, Tensor? bias) -> Tensor",
        _linear,
        _fake,
    )
    define_autograd("linear", _backward, _setup_context)
