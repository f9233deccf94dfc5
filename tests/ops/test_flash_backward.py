"""qfuse.flash_attention_backward: the gradients of attention from its result and its sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.utils.checkpoint import checkpoint

from inductor_q.backend import qfuse
from inductor_q.ops import flash_backward
from inductor_q.ops.registry import define_ops
from inductor_q.passes.graph import emit

define_ops()

BACKWARD = torch.ops.qfuse.flash_attention_backward
OF_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


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


class Swap(CustomGraphPass):
    """Put the op into a joint graph, in the place of the backward of a CPU's FlashAttention."""

    def __call__(self, graph: fx.Graph) -> None:
        (old,) = graph.find_nodes(op="call_function", target=OF_CPU)
        with graph.inserting_before(old):
            given = (*old.args[:6], old.args[7])  # without the rate of dropout
            new = emit(graph, BACKWARD.default, given, old, scale=old.kwargs.get("scale"))
        old.replace_all_uses_with(new)
        graph.erase_node(old)

    def uuid(self) -> None:
        return None


def test_inductor_hands_over_what_was_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features lie side by side, as the kernel asks, where Inductor would lay them otherwise."""
    strides: list[tuple[int, ...]] = []
    composed = flash_backward._composed

    def note(*args: Any) -> Any:
        strides.extend(x.stride() for x in args[1:4])
        return composed(*args)

    def segment(x: Tensor, y: Tensor) -> Tensor:
        q, k = (t.mT.sin().mT for t in (x, y))
        return attend(q, k, k, is_causal=True)

    def run(x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = checkpoint(segment, x, y, use_reentrant=False)
        return result

    monkeypatch.setattr(flash_backward, "_composed", note)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 4, 9, 16, generator=generator) for _ in range(2)]
    # Without a packed weight or a plan no pass of ours runs.
    options: Any = {"joint_custom_pre_pass": Swap(), "qfuse.memory": "1GB"}
    gradients = []
    for call in (run, torch.compile(run, backend=qfuse, options=options)):
        torch._dynamo.reset()
        leaves = [x.clone().requires_grad_() for x in inputs]
        call(*leaves).sin().sum().backward()
        gradients.append([x.grad for x in leaves])
    assert strides == [x.stride() for x in (inputs[0], inputs[1], inputs[1])]
    for own, eager in zip(*reversed(gradients), strict=True):
        torch.testing.assert_close(own, eager)
