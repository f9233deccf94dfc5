"""The gradients of `scatter2scatter`, in terms of itself and `grouped_gram`.

With `g` the gate of a slot, `y = g (W x + s B A x + b)` and `u = W' dy + s A' B' dy`, which is the
same product on the transposed weights:

    dx = g u        dg = u . x + dy . b       (so the unweighted result need not be kept)
    dA = (g s B' dy) x'     dB = dy (g s A x)'     db = g dy     dW = g dy x'

`A x` was kept, `B' dy` comes out of the product that gives `u`, and gates and scaling go to the
narrow side of every sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inductor_q.kernels.calls import DENSE
from inductor_q.ops.grouped_gram import grouped_gram

# Places of the op's arguments that take a gradient.
X, OPERANDS, LORA_A, LORA_B, BIAS, GATES, COUNT = 0, 1, 12, 13, 15, 16, 18


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, operands, ctx.format, ctx.shape, ctx.transposed, *routing = inputs[:9]
    ctx.top_k, ctx.grouped_in, ctx.grouped_out, a, b, ctx.scaling, bias, gates = inputs[9:-1]
    ctx.provider = inputs[-1]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, *routing, a, b, bias, gates, output[1], *operands)


def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # once: under a checkpoint each access would compute again
    x, order, _inverse, offsets, _tiles, a, b, bias, gates, rank, *operands = saved
    need = ctx.needs_input_grad
    grads: list[Any] = [None] * COUNT
    grads[OPERANDS] = [None] * len(operands)
    gate = None if gates is None else gates.reshape(-1)[order].unsqueeze(1)  # [R, 1]

    def weighted(rows: Tensor, factor: float) -> Tensor:
        """Grouped rows times their gates and `factor`, rounded once."""
        if gate is None:
            return rows * factor
        product: Tensor = rows * (gate.float() * factor)
        return product.to(rows.dtype)

    def gram(left: Tensor, right: Tensor, grouped: tuple[bool, bool], dtype: torch.dtype) -> Tensor:
        return grouped_gram(left, right, order, offsets, ctx.top_k, grouped, dtype)

    grad_rank = None
    if need[X] or need[GATES]:
        grads[X], grads[GATES], grad_rank = _input_gradients(ctx, saved, grad, gate)
    elif need[LORA_A]:
        grad_rank, _ = _product(
            ctx, saved, grad, [b], DENSE, b.shape, transposed=True, grouped_out=True
        )
    if need[LORA_A]:
        assert grad_rank is not None
        grouped = (True, ctx.grouped_in)
        grads[LORA_A] = gram(weighted(grad_rank, ctx.scaling), x, grouped, a.dtype)
    if need[LORA_B]:
        grouped = (ctx.grouped_out, True)
        grads[LORA_B] = gram(grad, weighted(rank, ctx.scaling), grouped, b.dtype)
    if need[BIAS]:
        ones = weighted(grad.new_ones(order.shape[0], 1), 1.0)
        grads[BIAS] = gram(grad, ones, (ctx.grouped_out, True), bias.dtype).squeeze(2)
    if need[OPERANDS][0]:  # a dense weight that trains
        rows = weighted(grad if ctx.grouped_out else grad[order // ctx.top_k], 1.0)
        dtype = operands[0].dtype
        if ctx.transposed:
            grads[OPERANDS][0] = gram(x, rows, (ctx.grouped_in, True), dtype)
        else:
            grads[OPERANDS][0] = gram(rows, x, (True, ctx.grouped_in), dtype)
    return tuple(grads)


def _input_gradients(
    ctx: Any, saved: tuple[Any, ...], grad: Tensor, gate: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradients of x and of the gates, and `B' dy` [R, r] in grouped order."""
    x, order, inverse, offsets, _tiles, a, b, bias, gates, _, *operands = saved
    separate = ctx.needs_input_grad[GATES]
    u, grad_rank = _product(
        ctx,
        saved,
        grad,
        operands,
        ctx.format,
        ctx.shape,
        transposed=not ctx.transposed,
        grouped_out=separate or ctx.grouped_in,
        lora_a=None if b is None else b.transpose(1, 2),
        lora_b=None if a is None else a.transpose(1, 2),
        gates=None if separate else gates,
    )
    if not separate:
        return u, None, grad_rank
    assert gate is not None
    rows = torch.arange(order.shape[0], dtype=torch.int32, device=order.device)
    x_rows = x if ctx.grouped_in else x[order // ctx.top_k]
    dot = (u.float() * x_rows.float()).sum(1)
    if bias is not None:
        expert = torch.searchsorted(offsets[1:], rows, right=True).clamp(max=bias.shape[0] - 1)
        grad_rows = grad if ctx.grouped_out else grad[order // ctx.top_k]
        dot = dot + (grad_rows.float() * bias[expert].float()).sum(1)
    dot = torch.where(rows < offsets[-1], dot, 0.0)
    grad_gates = dot[inverse].reshape(gates.shape).to(gates.dtype)
    grad_x = (u * gate.float()).to(x.dtype)
    if not ctx.grouped_in:
        grad_x = grad_x[inverse].reshape(*gates.shape, -1).sum(1)
    return grad_x, grad_gates, grad_rank


def _product(
    ctx: Any,
    saved: tuple[Any, ...],
    grad: Tensor,
    operands: list[Tensor],
    format: str,
    shape: Any,
    *,
    transposed: bool,
    grouped_out: bool,
    lora_a: Tensor | None = None,
    lora_b: Tensor | None = None,
    gates: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rows of `grad`, as the op gave them out, times weights, with the op's routing."""
    _, *routing = saved[:5]
    result: tuple[Tensor, Tensor] = torch.ops.qfuse.scatter2scatter(
        grad,
        operands,
        format,
        list(shape),
        transposed,
        *routing,
        ctx.top_k,
        ctx.grouped_out,
        grouped_out,
        lora_a,
        lora_b,
        ctx.scaling,
        None,
        gates,
        ctx.provider,
    )
    return result
