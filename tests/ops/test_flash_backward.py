"""qfuse.flash_attention_backward: the gradients of attention from its result and its sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attend

from inductor_q.ops.registry import define_ops

define_ops()

BACKWARD = torch.ops.qfuse.flash_attention_backward


def operands(groups: int, queries: int, keys: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, queries, 16), (2, groups, keys, 16), (2, groups, keys, 16)]
    made = [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in made]  # as projections lie


def sums(q: Tensor, k: Tensor, is_causal: bool, scale: float) -> Tensor:
    scores = q.float() @ k.float().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return scores.logsumexp(-1)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_are_those_of_attention(groups: int, is_causal: bool, dtype: torch.dtype) -> None:
    q, k, v = operands(groups, 9, 9 if is_causal else 13, dtype)
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    a, b, c = leaves
    exact = attend(a, b, c, is_causal=is_causal, enable_gqa=True, scale=0.3)
    grad = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact.backward(grad.double())
    out, found = exact.detach().to(dtype), sums(q, k, is_causal, 0.3)
    got = BACKWARD(grad, q, k, v, out, found, is_causal, scale=0.3)
    for own, x, leaf in zip(got, (q, k, v), leaves, strict=True):
        assert (own.dtype, own.stride()) == (dtype, x.stride())
        tolerance = 1e-5 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(own.double(), leaf.grad, rtol=tolerance, atol=tolerance)


def test_the_scale_is_that_of_attention_where_none_is_given() -> None:
    q, k, v = operands(2, 5, 5, torch.float32)
    found = sums(q, k, True, 0.25)
    one = BACKWARD(q, q, k, v, q, found, True)
    for a, b in zip(one, BACKWARD(q, q, k, v, q, found, True, scale=0.25), strict=True):
        assert torch.equal(a, b)


def test_opcheck() -> None:
    q, k, v = operands(2, 5, 5, torch.float32)
    given = (q, q, k, v, q, sums(q, k, True, 0.25), True)
    torch.library.opcheck(BACKWARD.default, given, {"scale": 0.25})
