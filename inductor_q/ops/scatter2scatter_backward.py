"""The gradients of `scatter2scatter`, in terms of the op itself and `grouped_gram`.

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
from inductor_q.kernels.dispatch import preferred, preferring
from inductor_q.kernels.expert_calls import ARGUMENTS, IN_FP8, Scatter2Scatter, arguments
from inductor_q.ops.grouped_gram import grouped_gram

OP = "scatter2scatter"
#: Arguments that are saved for backward beside the operands; the others are no tensors.
SAVED = (
    *("x", "order", "inverse", "offsets", "tiles"),
    *("lora_a", "lora_b", "bias", "gates", "row_scale"),
)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    named = dict(zip(ARGUMENTS, inputs, strict=True))
    ctx.op = OP if named["row_scale"] is None else IN_FP8
    ctx.wanted = preferred(ctx.op)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*[named.pop(name) for name in SAVED], output[1], *named.pop("operands"))
    ctx.settings = named


def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # once: under a checkpoint each access would compute again
    rank, *operands = saved[len(SAVED) :]
    tensors = dict(zip(SAVED, saved, strict=False))
    forward = Scatter2Scatter(operands=operands, **tensors, **ctx.settings)
    need = dict(zip(ARGUMENTS, ctx.needs_input_grad, strict=True))
    with preferring(ctx.op, ctx.wanted):
        grads = _gradients(forward, rank, grad, need)
    grads.setdefault("operands", [None] * len(operands))
    return tuple([grads.get(name) for name in ARGUMENTS])


def _gradients(
    forward: Scatter2Scatter, rank: Tensor, grad: Tensor, need: dict[str, Any]
) -> dict[str, Any]:
    """Return the gradients that are needed, by argument; `rank` is the op's second result."""
    x, order, a, b, gates = (
        *(forward.x, forward.order),
        *(forward.lora_a, forward.lora_b, forward.gates),
    )
    grads: dict[str, Any] = {}
    gate = None if gates is None else gates.reshape(-1)[order].unsqueeze(1)  # [R, 1]

    def weighted(rows: Tensor, factor: float) -> Tensor:
        """Multiply grouped rows with their gates and `factor`, and round once."""
        if gate is None:
            return rows * factor
        product: Tensor = rows * (gate.float() * factor)
        return product.to(rows.dtype)

    def gram(left: Tensor, right: Tensor, grouped: tuple[bool, bool], dtype: torch.dtype) -> Tensor:
        return grouped_gram(left, right, order, forward.offsets, forward.top_k, grouped, dtype)

    grad_rank = None
    if need["x"] or need["gates"]:
        grads["x"], grads["gates"], grad_rank = _input_gradients(
            forward, grad, gate, separate=need["gates"]
        )
    elif need["lora_a"]:
        assert b is not None
        grad_rank, _ = _product(
            forward,
            grad,
            operands=[b.contiguous()],
            format=DENSE,
            shape=list(b.shape),
            transposed=True,
            grouped_out=True,
        )
    if need["lora_a"]:
        assert grad_rank is not None and a is not None
        grouped = (True, forward.grouped_in)
        grads["lora_a"] = gram(weighted(grad_rank, forward.scaling), x, grouped, a.dtype)
    if need["lora_b"]:
        assert b is not None
        grouped = (forward.grouped_out, True)
        grads["lora_b"] = gram(grad, weighted(rank, forward.scaling), grouped, b.dtype)
    if need["bias"]:
        assert forward.bias is not None
        ones = weighted(grad.new_ones(order.shape[0], 1), 1.0)
        grouped = (forward.grouped_out, True)
        grads["bias"] = gram(grad, ones, grouped, forward.bias.dtype).squeeze(2)
    if need["operands"][0]:  # a dense weight that trains
        rows = weighted(grad if forward.grouped_out else grad[order // forward.top_k], 1.0)
        dtype = forward.operands[0].dtype
        if forward.transposed:
            weight = gram(x, rows, (forward.grouped_in, True), dtype)
        else:
            weight = gram(rows, x, (True, forward.grouped_in), dtype)
        grads["operands"] = [weight]
    return grads


def _input_gradients(
    forward: Scatter2Scatter, grad: Tensor, gate: Tensor | None, *, separate: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return gradients of x and, if `separate`, of the gates; and `B' dy` [R, r], grouped."""
    a, b, bias, gates = forward.lora_a, forward.lora_b, forward.bias, forward.gates
    u, grad_rank = _product(
        forward,
        grad,
        operands=list(forward.operands),
        format=forward.format,
        shape=list(forward.shape),
        transposed=not forward.transposed,
        grouped_out=separate or forward.grouped_in,
        lora_a=None if b is None else b.transpose(1, 2),
        lora_b=None if a is None else a.transpose(1, 2),
        gates=None if separate else gates,
        row_scale=forward.row_scale,
    )
    if not separate:
        return u, None, grad_rank
    assert gate is not None and gates is not None
    x, order, offsets, inverse = forward.x, forward.order, forward.offsets, forward.inverse
    rows = torch.arange(order.shape[0], dtype=torch.int32, device=order.device)
    x_rows = x if forward.grouped_in else x[order // forward.top_k]
    dot = (u.float() * x_rows.float()).sum(1)
    if bias is not None:
        expert = torch.searchsorted(offsets[1:], rows, right=True).clamp(max=bias.shape[0] - 1)
        grad_rows = grad if forward.grouped_out else grad[order // forward.top_k]
        dot = dot + (grad_rows.float() * bias[expert].float()).sum(1)
    dot = torch.where(rows < offsets[-1], dot, 0.0)
    grad_gates = dot[inverse].reshape(gates.shape).to(gates.dtype)
    grad_x = (u * gate.float()).to(x.dtype)
    if not forward.grouped_in:
        grad_x = grad_x[inverse].reshape(*gates.shape, -1).sum(1)
    return grad_x, grad_gates, grad_rank


def _product(forward: Scatter2Scatter, grad: Tensor, **changes: Any) -> tuple[Tensor, Tensor]:
    """Multiply rows of `grad`, as the op gave them out, with weights, by the op's routing."""
    result: tuple[Tensor, Tensor] = torch.ops.qfuse.scatter2scatter(
        *arguments(
            x=grad,
            order=forward.order,
            inverse=forward.inverse,
            offsets=forward.offsets,
            tiles=forward.tiles,
            top_k=forward.top_k,
            grouped_in=forward.grouped_out,
            scaling=forward.scaling,
            **changes,
        )
    )
    return result
