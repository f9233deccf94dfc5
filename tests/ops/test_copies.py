"""ops/copies.py: copies between a GPU and the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from inductor_q.ops.registry import define_ops

define_ops()
QFUSE = torch.ops.qfuse
HOST = torch.device("cpu")


@pytest.mark.parametrize("x", [torch.randn(4, 6), torch.randn(2, 4, 6).transpose(1, 2)])
def test_opcheck(x: Tensor) -> None:
    opcheck(QFUSE.copy_start.default, (x, HOST, None))
    opcheck(QFUSE.copy_start.default, (x, HOST, x))
    opcheck(QFUSE.copy_end.default, (torch.empty(0), x, HOST))


def test_a_copy_is_another_tensor_of_the_same_strides() -> None:
    x = torch.randn(2, 4, 6).transpose(1, 2)
    copy = QFUSE.copy_end(QFUSE.copy_start(x, HOST, None), x, HOST)
    assert torch.equal(copy, x)
    assert copy.stride() == x.stride()
    assert copy.data_ptr() != x.data_ptr()


@pytest.mark.gpu
def test_there_and_back_without_waiting() -> None:
    """What was copied may be overwritten behind the end, and so may what came back."""
    device = torch.device("cuda", torch.cuda.current_device())
    values = [torch.randn(1 << 22, device=device) for _ in range(4)]
    expected = [x.clone() for x in values]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            sent = []
            for x in values:
                ticket = QFUSE.copy_start(x, HOST, None)
                sent.append(QFUSE.copy_end(ticket, x, HOST))
                x.fill_(7)
            tickets = [QFUSE.copy_start(x, device, values[0]) for x in sent]
            values = [QFUSE.copy_end(t, x, device) for t, x in zip(tickets, sent, strict=True)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(x.is_pinned() for x in sent)
    assert all(map(torch.equal, values, expected))


@pytest.mark.gpu
def test_a_copy_that_nobody_ends_spoils_nothing() -> None:
    """As after an error in between: its memory is given away only when it has been written."""
    device = torch.device("cuda", torch.cuda.current_device())
    host = torch.ones(1 << 26, pin_memory=True)
    for _ in range(3):
        ticket = QFUSE.copy_start(host, device, None)
        del ticket
        other = torch.zeros(1 << 26, device=device)
        torch.cuda.synchronize()
        assert not other.any()


@pytest.mark.gpu
def test_hooks_of_saved_tensors_read_whole_ones() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.ones(1 << 26, device=device)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        copy = QFUSE.copy_end(QFUSE.copy_start(x, HOST, None), x, HOST)
        assert bool(copy.all())
