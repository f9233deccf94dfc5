"""`qfuse::flash_attention_backward`: the gradients of FlashAttention, for any length.

It is torch's `_scaled_dot_product_flash_attention_backward` without dropout. Inductor guards that
one on whether the length is a multiple of 8, since it asks that of each operand's strides, those of
the logarithms of sums among them; so a graph for every length was compiled twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_q.ops.library import define

SCHEMA = (
    "flash_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor logsumexp, bool is_causal, *, float? scale=None) -> (Tensor, Tensor, Tensor)"
)


def flash_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values.

    Args:
        grad, out: [B, H, S, D], the gradient of the result, and the result.
        query: [B, H, S, D].
        key, value: [B, G, T, D], G of them for H heads.
        logsumexp: [B, H, S] float32, the logarithm of the sum of each row's exponentials.
        is_causal: whether a query sees the keys up to its own position, where S == T.
        scale: of the scores; None: D ** -0.5.
    """
    if not query.is_cuda:
        return _composed(grad, query, key, value, out, logsumexp, is_causal, scale)
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)  # nothing reads it
    lengths = (None, None, query.shape[2], key.shape[2])  # of sequences that are not packed
    given = (grad, query, key, value, out, logsumexp, *lengths, 0.0, is_causal, seed, seed)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    gradients: tuple[Tensor, Tensor, Tensor] = backward(*given, scale=scale)
    return gradients


def _composed(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute them by torch's products, in float32 (arXiv:2205.14135, algorithm 4)."""
    by = query.shape[-1] ** -0.5 if scale is None else scale
    groups = key.shape[1]
    q, d_out, o = (x.float().unflatten(1, (groups, -1)) for x in (query, grad, out))
    k, v = (x.float().unsqueeze(2) for x in (key, value))
    scores = q @ k.mT * by
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    weights = (scores - logsumexp.unflatten(1, (groups, -1)).unsqueeze(-1)).exp()
    d_value = (weights.mT @ d_out).sum(2)
    d_scores = weights * (d_out @ v.mT - (d_out * o).sum(-1, keepdim=True)) * by
    d_query, d_key = (d_scores @ k).flatten(1, 2), (d_scores.mT @ q).sum(2)
    made = _empty(query), _empty(key), _empty(value)
    for gradient, values in zip(made, (d_query, d_key, d_value), strict=True):
        gradient.copy_(values)
    return made


def _fake(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(query), _empty(key), _empty(value)


def _empty(x: Tensor) -> Tensor:
    """Allocate a gradient as FlashAttention does, which goes by [B, S, H, D]."""
    return torch.empty_like(x.transpose(1, 2)).transpose(1, 2)


def define_flash_backward() -> None:
    # Without the tag Inductor may hand over features that lie apart, which the kernel refuses.
    tags = (torch.Tag.needs_fixed_stride_order,)
    define(SCHEMA, flash_attention_backward, _fake, tags=tags)
