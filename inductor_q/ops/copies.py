"""`qfuse::copy_start` and `qfuse::copy_end`: copy between a GPU and pinned memory of the host while
the GPU computes.

Each direction has a stream of its own, which begins a copy behind what the current stream has been
given by then. `copy_end` has the current stream wait for the copy, and returns it: what is computed
behind that reads the whole copy, and may take the memory of what was copied, which the op reads, so
that nothing ends or overwrites it before. The host waits for nothing; to it a tensor in its memory
is whole only behind the stream.

Between the two a ticket stands for the copy: an empty tensor, which holds it. A ticket without one,
as between two tensors of the host, is no error: `copy_end` copies then.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from inductor_q.ops.library import define


class _Flight:
    """A copy on its way."""

    def __init__(self, x: Tensor, to: torch.device) -> None:
        self.device = x.device if x.is_cuda else to
        here = torch.cuda.current_stream(self.device)
        self.side = _side(self.device, to.type)
        self.copy: Tensor | None = _like(x, to)
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side):
            # torch's allocator of pinned memory notes the stream by itself.
            self.copy.copy_(x, non_blocking=True)
            self.landed = self.side.record_event()

    def land(self) -> Tensor:
        copy, self.copy = self.copy, None
        assert copy is not None, "a ticket is for one copy"
        torch.cuda.current_stream(self.device).wait_event(self.landed)
        if not copy.is_cuda and torch._C._autograd._top_saved_tensors_default_hooks(False):
            self.landed.synchronize()  # such a hook may read the tensor
        return copy

    def __del__(self) -> None:
        if self.copy is not None and self.copy.is_cuda:  # there was an error in between
            self.copy.record_stream(self.side)


@functools.cache
def _side(device: torch.device, to: str) -> torch.cuda.Stream:
    """Return the stream of a device's copies to one side of the link."""
    return torch.cuda.Stream(device)


def _like(x: Tensor, to: torch.device) -> Tensor:
    """Make room for a copy with the strides of `x`, on the host in pinned memory."""
    if to.type == "cuda" or not x.is_cuda:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=to)
    # Unlike torch's public function this one never fills (`use_deterministic_algorithms`), for
    # which the host would take longer than the link.
    pinned: Any = torch._C._dynamo.guards._empty_strided_cpu_pinned  # type: ignore[attr-defined]
    room: Tensor = pinned(tuple(x.shape), x.stride(), x.dtype)
    return room


def copy_start(x: Tensor, to: torch.device, behind: Tensor | None) -> Tensor:
    """Begin to copy `x`, and return a ticket. `behind` is not read: compiled code that has computed
    it computes no earlier what the copy is for."""
    ticket: Any = torch.empty(0)
    if x.is_cuda != (to.type == "cuda"):
        ticket.flight = _Flight(x, to)
    return ticket  # type: ignore[no-any-return]


def copy_end(ticket: Tensor, x: Tensor, to: torch.device) -> Tensor:
    """Return the copy of `x` that the ticket is for, as of what the current stream does next."""
    flight: _Flight | None = getattr(ticket, "flight", None)
    return flight.land() if flight is not None else _like(x, to).copy_(x)


def _fake_start(x: Tensor, to: torch.device, behind: Tensor | None) -> Tensor:
    return torch.empty(0)


def _fake_end(ticket: Tensor, x: Tensor, to: torch.device) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=to)


def define_copies() -> None:
    tags = (torch.Tag.needs_exact_strides,)
    define(
        "copy_start(Tensor x, Device to, Tensor? behind) -> Tensor",
        copy_start,
        _fake_start,
        tags=tags,
    )
    define("copy_end(Tensor ticket, Tensor x, Device to) -> Tensor", copy_end, _fake_end, tags=tags)
