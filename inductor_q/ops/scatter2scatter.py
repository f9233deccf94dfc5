"""`qfuse::scatter2scatter`: every token times the weights of its experts (arXiv 2403.08245).

Rows come in and go out scattered, one per token, or grouped, one per slot and each expert's
together (`inductor_q.ops.routing`), so a layer never copies tokens only to sort them. Weights are
packed in any format or dense, and each expert may have a LoRA adapter. The input gradient is this
op again on the same packed weights; the adapters' gradients are two `grouped_gram`s. The op saves
`x`, the adapters, the packed weights and `x @ A'`, which has r columns, for backward; never a
dequantized expert, and, gates or not, never the unweighted result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inductor_q.kernels.calls import schema
from inductor_q.kernels.dispatch import serve
from inductor_q.kernels.expert_calls import Scatter2Scatter, arguments, unchecked
from inductor_q.ops.library import define, define_autograd

if TYPE_CHECKING:
    from inductor_q.ops.routing import Routing

SCHEMA = schema("scatter2scatter", Scatter2Scatter, "(Tensor, Tensor)")


def scatter2scatter(
    x: Tensor,
    operands: Sequence[Tensor],
    format: str,
    shape: Sequence[int],
    routing: Routing,
    *,
    transposed: bool = False,
    grouped_in: bool = False,
    grouped_out: bool = False,
    lora_a: Tensor | None = None,
    lora_b: Tensor | None = None,
    scaling: float = 1.0,
    bias: Tensor | None = None,
    gates: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> Tensor:
    """Return `gate * (x @ W_e' + scaling * (x @ A_e') @ B_e' + bias_e)` of each slot's expert e.

    Args:
        x: [R, K] where `grouped_in`, R = tokens * top_k rows in grouped order; else [tokens, K].
        operands, format, shape: the weights [E, N, K], as in `dequantize`, quantized along the
            flattened stack; or one dense tensor and the format "dense".
        routing: `experts.route` of this layer's choices.
        transposed: the weights are stored as [E, K, N], and `shape` says so.
        grouped_out: return rows in grouped order; else the sum of each token's slots.
        lora_a, lora_b: [E, r, K] and [E, N, r], any float dtype; computed in the dtype of `x`.
        scaling: the adapters' factor.
        bias: [E, N] or None.
        gates: [tokens, top_k], a factor per slot, or None.
        row_scale: [E * N], or [E * K] where `transposed`: for each row of the weights the float32
            scale under which its numbers fit e4m3 (`ops.eight_bits`), to multiply in FP8, for the
            gradient of x, too; None for 16 bits. Adapters stay in the dtype of `x`. But on Hopper
            the reference computes it, which multiplies every row with every expert on a GPU.

    Returns:
        [R, N] or [tokens, N], in the dtype of `x`; a slot's terms and a token's slots are added in
        float32. Slots of sentinels are skipped: zero where rows are grouped, no term elsewhere.
        Gradients reach `x`, the adapters, `bias`, `gates` and dense weights, and are
        deterministic; those of an expert without rows are exactly zero.

    Raises:
        WrongShape, WrongDtype, WrongDevice, UnknownFormat, CorruptQuantState.
    """
    result: tuple[Tensor, Tensor] = torch.ops.qfuse.scatter2scatter(
        *arguments(
            x=x,
            operands=list(operands),
            format=format,
            shape=list(shape),
            transposed=transposed,
            order=routing.order,
            inverse=routing.inverse,
            offsets=routing.offsets,
            tiles=routing.tiles,
            top_k=routing.top_k,
            grouped_in=grouped_in,
            grouped_out=grouped_out,
            lora_a=lora_a,
            lora_b=lora_b,
            scaling=scaling,
            bias=bias,
            gates=gates,
            row_scale=row_scale,
        )
    )
    return result[0]


def _checked(args: Sequence[Any]) -> Scatter2Scatter:
    call = unchecked(args)
    call.check()
    return call


def _scatter2scatter(*args: Any) -> tuple[Tensor, Tensor]:
    call = _checked(args)
    result: tuple[Tensor, Tensor] = serve(call.op, call)
    return result


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    return _checked(args).results()


def define_scatter2scatter() -> None:
    from inductor_q.ops.scatter2scatter_backward import backward, setup_context

    define(SCHEMA, _scatter2scatter, _fake)
    define_autograd("scatter2scatter", backward, setup_context)
