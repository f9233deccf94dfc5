"""`qfuse::lora_linear`: a quantized linear layer with LoRA adapters (arXiv 2106.09685)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inductor_q.exc import WrongShape
from inductor_q.kernels.checks import check_device
from inductor_q.ops.library import define, define_autograd
from inductor_q.ops.linear import check_input


def lora_linear(
    x: Tensor,
    operands: Sequence[Tensor],
    format: str,
    shape: Sequence[int],
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    scaling: Sequence[float],
    bias: Tensor | None = None,
) -> Tensor:
    """Return `x @ W.t() + bias + sum_i scaling[i] * (x @ A_i.t()) @ B_i.t()`.

    Args:
        x: [..., K].
        operands, format, shape: the weight [N, K], as in `dequantize`.
        lora_a, lora_b: A_i [r_i, K] and B_i [N, r_i], any float dtype; each adapter computes in its
            own dtype, as PEFT does, and its sum with the base is rounded to the dtype of `x`.
        scaling: one factor per adapter.
        bias: [N] or None.

    Returns:
        [..., N] in the dtype of `x`. Gradients reach `x`, every A and B, and `bias`. `x`, the
        adapters and packed bytes are saved for backward; the rest is computed again.

    Raises:
        WrongShape, WrongDevice: `x` or an adapter does not fit the weight, or one of them lies
            on another device.
    """
    result: Tensor = torch.ops.qfuse.lora_linear(
        x, list(operands), format, list(shape), list(lora_a), list(lora_b), list(scaling), bias
    )
    return result


def _check(
    x: Tensor,
    operands: Sequence[Tensor],
    shape: Sequence[int],
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    bias: Tensor | None,
) -> None:
    check_input(x, operands, shape, bias)
    check_device("adapter", [*lora_a, *lora_b], x)
    for i, (a, b) in enumerate(zip(lora_a, lora_b, strict=True)):
        expected = ((a.shape[0], shape[1]), (shape[0], a.shape[0]))
        if (tuple(a.shape), tuple(b.shape)) != expected:
            raise WrongShape(
                what=f"adapter {i} (A, B) of a weight {tuple(shape)}",
                expected=expected,
                got=(tuple(a.shape), tuple(b.shape)),
            )


def _lora_linear(
    x: Tensor,
    operands: Sequence[Tensor],
    format: str,
    shape: Sequence[int],
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    scaling: Sequence[float],
    bias: Tensor | None,
) -> Tensor:
    _check(x, operands, shape, lora_a, lora_b, bias)
    weight = torch.ops.qfuse.dequantize(operands, format, shape, x.dtype)
    y = torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
    for a, b, s in zip(lora_a, lora_b, scaling, strict=True):
        y = y + (((x.to(a.dtype) @ a.t()) * s) @ b.t()).to(y.dtype)
    return y.contiguous()


def _fake(
    x: Tensor,
    operands: Sequence[Tensor],
    format: str,
    shape: Sequence[int],
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    scaling: Sequence[float],
    bias: Tensor | None,
) -> Tensor:
    _check(x, operands, shape, lora_a, lora_b, bias)
    return x.new_empty((*x.shape[:-1], shape[0]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, operands, ctx.format, ctx.shape, lora_a, lora_b, ctx.scaling, bias = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.counts = len(operands), len(lora_a)
    ctx.save_for_backward(x, *operands, *lora_a, *lora_b)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    n_operands, n_adapters = ctx.counts
    x, *rest = ctx.saved_tensors
    operands = rest[:n_operands]
    lora_a = rest[n_operands : n_operands + n_adapters]
    lora_b = rest[n_operands + n_adapters :]
    need = ctx.needs_input_grad
    grad_2d, x_2d = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    grad_x = grad_bias = None
    if need[0]:
        weight = torch.ops.qfuse.dequantize(operands, ctx.format, ctx.shape, grad.dtype)
        grad_x = grad_2d @ weight
    grad_a: list[Tensor | None] = []
    grad_b: list[Tensor | None] = []
    for a, b, s in zip(lora_a, lora_b, ctx.scaling, strict=True):
        g = grad_2d.to(b.dtype)
        g_rank = (g @ b) * s
        if grad_x is not None:
            grad_x = grad_x + (g_rank @ a).to(grad_x.dtype)
        grad_a.append(g_rank.t() @ x_2d.to(a.dtype))
        grad_b.append((g.t() @ (x_2d.to(a.dtype) @ a.t())) * s)
    if need[7]:
        grad_bias = grad_2d.sum(0, dtype=ctx.bias_dtype)
    if grad_x is not None:
        grad_x = grad_x.reshape(x.shape)
    # torch takes an empty list for a list of tensors, which has a list of gradients
    no_scaling: list[None] | None = None if ctx.scaling else []
    return grad_x, [None] * n_operands, None, None, grad_a, grad_b, no_scaling, grad_bias


def define_lora_linear() -> None:
    define(
        "lora_linear(Tensor x, Tensor[] operands, str format, SymInt[] shape, Tensor[] lora_a, "
        "Tensor[] lora_b, float[] scaling, Tensor? bias) -> Tensor",
        _lora_linear,
        _fake,
    )
    define_autograd("lora_linear", _backward, _setup_context)
