"""Attention of a few queries that see the same keys: the op, and its Triton kernel interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import inductor_q.ops  # noqa: F401 - it defines the op
from inductor_q.exc import WrongDtype, WrongShape
from inductor_q.kernels import attention_rows_triton
from inductor_q.kernels.rows_calls import AttentionRows
from tests.support.interpret_attention_rows import SIZES, error, tensors
from tests.support.processes import interpreted

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def op(call: AttentionRows) -> Any:
    return torch.ops.qfuse.attention_rows(call.query, call.key, call.value, call.mask, call.scale)


def on(call: AttentionRows, device: str, **others: Any) -> AttentionRows:
    moved = {name: getattr(call, name).to(device) for name in ("query", "key", "value", "mask")}
    return AttentionRows(**{**moved, "scale": call.scale, **others})


def test_triton_in_the_interpreter() -> None:
    assert interpreted("interpret_attention_rows") == [
        len(SIZES) * 2 * 2 * 3
    ]  # dtypes, blocks, masks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_op(size: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """As sdpa gives, near to float64; zero where no key is seen."""
    call = on(tensors(size, dtype), device)
    expected = torch.nn.functional.scaled_dot_product_attention(
        call.query, call.key, call.value, attn_mask=call.mask, scale=call.scale
    )
    assert error(op(call), call) <= 1.25 * error(expected, call) + 1e-7
    hidden = call.mask.clone()
    hidden[0] = False
    result = op(on(call, device, mask=hidden))
    assert not result[0].any()
    assert size[0] == 1 or result[1:].any()


@pytest.mark.parametrize("size", [SIZES[0], (0, 2, 4, 8, 16), (2, 2, 0, 8, 16), (2, 2, 4, 0, 16)])
def test_opcheck(size: tuple[int, ...]) -> None:
    shape = [max(1, n) for n in size]
    call = tensors(tuple(shape), torch.float32)
    batch, _, rows, keys, _ = size
    tensors_given = (
        call.query[:batch, :, :rows],
        call.key[:batch, :, :keys],
        call.value[:batch, :, :keys],
        call.mask[:batch, ..., :keys],
    )
    given = [t if t.numel() else t.new_empty(t.shape) for t in tensors_given]
    op_itself = torch.ops.qfuse.attention_rows.default
    torch.library.opcheck(op_itself, (*given, call.scale))
    assert op_itself(*given, call.scale).shape == given[0].shape


def test_what_does_not_fit_is_named() -> None:
    call = tensors(SIZES[0], torch.float32)
    with pytest.raises(WrongShape, match="mask"):
        op(on(call, "cpu", mask=call.mask[..., 1:]))
    with pytest.raises(WrongShape, match="value"):
        op(on(call, "cpu", value=call.value[:, :1]))
    with pytest.raises(WrongDtype, match="mask"):
        op(on(call, "cpu", mask=call.mask.float()))
    with pytest.raises(WrongDtype, match="key"):
        op(on(call, "cpu", key=call.key.half()))


def test_what_the_kernel_refuses() -> None:
    call = tensors(SIZES[0], torch.float32)
    refuses = attention_rows_triton.KERNEL.refuses
    assert not refuses(call)
    assert "features" in refuses(tensors((1, 1, 1, 8, 24), torch.float32))
    assert "65 queries" in refuses(tensors((1, 1, 65, 8, 16), torch.float32))
    assert "64 queries" in refuses(tensors((1, 1, 64, 8, 256), torch.float32))
    assert "float64" in refuses(on(call, "cpu", query=call.query.double()))
    apart = call.key.mT.contiguous().mT
    assert "side by side" in refuses(on(call, "cpu", key=apart))


@pytest.mark.gpu
def test_gpu_calls_are_captured_and_served_by_triton() -> None:
    """In a CUDA graph, with a cache as long as a model's."""
    call = on(tensors((2, 8, 4, 1024, 128), torch.bfloat16), "cuda")
    from inductor_q.kernels.dispatch import served_by

    assert served_by("attention_rows", call) == "triton"
    expected = op(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op(call)
    call.key.copy_(call.key.flip(1))
    graph.replay()
    assert torch.equal(result, op(call))
    assert not torch.equal(result, expected)
