"""Offload what forward keeps to the host's memory, where the link hides the copies.

A value goes out as soon as forward has computed it, and comes back in backward as late as the link
allows (`qfuse::copy_start`, `qfuse::copy_end`). Copies of one direction follow each other, so a
value is taken only where all copies with it end in time: those to the host before forward does,
those back before what reads them first. Times are those of `inductor_q.cost`, and of the link as
measured on the machine, with a reserve.

Taken are dense tensors that forward makes, that nothing but backward gets, no view of which is kept
beside, and that are large enough to be worth a copy. First come those that would take the longest
to compute again for a byte, among those that backward reads behind its peak.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from inductor_q.capture.example import hint
from inductor_q.cost import cost_of, finish_times, node_bytes
from inductor_q.inductor_config import wants_graphs
from inductor_q.liveness import COPY_START, Kinds, simulate, storages
from inductor_q.passes.graph import is_tangent
from inductor_q.resolved import Link, Resolved

COPY_END = torch.ops.qfuse.copy_end.default
_HOST = torch.device("cpu")

#: A copy takes as much longer than measured, while kernels read and write the same memory.
_RESERVE = 1.25

#: What is copied to measure the link, and how often.
_SAMPLE, _TIMES = 1 << 26, 4


def find_link(resolved: Resolved, device: torch.device) -> Link | str:
    """Return the rates of the link between a device and the host, or why nothing is offloaded."""
    if not resolved.offload:
        return ""
    if device.type != "cuda":
        return f"a {device.type} has no memory of its own"
    if wants_graphs(resolved.inductor):
        return "CUDA graphs do not run copies between device and host"
    if resolved.inductor.get("cpp_wrapper", inductor_config.cpp_wrapper):
        return "C++ wrapper code keeps no copy between two calls"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "processes of a group share the host's links, whose rate was measured for one"
    return _measure(device)


@functools.cache
def _measure(device: torch.device) -> Link:
    """Measure the rates once, each by the best of some copies; two digits of them are kept, since
    they are part of cache keys."""
    with _disable_current_modes(), torch.cuda.device(device):
        here = torch.empty(_SAMPLE, dtype=torch.uint8, device=device)
        there = torch.empty(_SAMPLE, dtype=torch.uint8, pin_memory=True)
        return Link(
            to_host=_rate(there, here),
            from_host=_rate(here, there),
            device=2 * _rate(torch.empty_like(here), here),
        )


def _rate(to: torch.Tensor, of: torch.Tensor) -> float:
    """Return how many bytes are copied in a second."""
    times = []
    for _ in range(_TIMES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        to.copy_(of, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(f"{_SAMPLE / min(times) * 1e3:.2g}")


@dataclass(frozen=True)
class Saved:
    """A value that can be offloaded: in the graph of forward, and in that of backward."""

    value: fx.Node
    given: fx.Node
    bytes: int


class Offload:
    """Choose what to offload of a partition, and edit its graphs."""

    def __init__(
        self,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        link: Link,
        rate: Callable[[str], float],
    ) -> None:
        self.modules, self.link, self.rate = (forward, backward), link, rate
        self.forward, self.backward = _Times(forward.graph), _Times(backward.graph)

    @functools.cached_property
    def order(self) -> list[Saved]:
        """List all that the link can carry, in the order in which it is chosen."""
        inputs = {node.name for node in self.modules[0].graph.find_nodes(op="placeholder")}
        held = list(simulate(self.modules[1].graph, inputs).held)
        left = sorted(self._candidates(), key=lambda saved: -self.rate(saved.value.name))
        chosen: list[Saved] = []
        while left:
            peak = held.index(max(held))
            late = (saved for saved in left if self.backward.first_use(saved.given) > peak)
            if (saved := next(late, None)) is None:
                break
            left.remove(saved)
            if self._out([*chosen, saved]) is None or self._back([*chosen, saved]) is None:
                continue
            chosen.append(saved)
            for place in range(self.backward.first_use(saved.given)):
                held[place] -= saved.bytes
        return chosen

    def share(self, share: float) -> list[Saved]:
        """Return the first ones that are this share of the bytes of all."""
        total, held, found = sum(saved.bytes for saved in self.order), 0, []
        for saved in self.order:
            if held >= share * total:
                break
            found.append(saved)
            held += saved.bytes
        return found

    def apply(self, chosen: Sequence[Saved]) -> set[str]:
        """Have both graphs copy what was chosen; return the names of nodes on the host."""
        forward, backward = (module.graph for module in self.modules)
        out, back = self._out(chosen), self._back(chosen)
        assert out is not None and back is not None
        on_host = set()
        for saved in sorted(chosen, key=lambda saved: self.forward.places[saved.value]):
            sent = self._send(forward, saved, out[saved])
            saved.given.meta |= {"val": sent.meta["val"]}
            saved.given.meta.pop("tensor_meta", None)
            on_host |= {sent.name, saved.given.name}
        # The last ones first: of two that begin behind the same node, the one read first begins.
        for saved in sorted(chosen, key=lambda s: -self.backward.first_use(s.given)):
            self._fetch(backward, saved, back[saved])
        for module in self.modules:
            module.graph.lint()
            module.recompile()
        return on_host

    def _candidates(self) -> Iterator[Saved]:
        forward, backward = (module.graph for module in self.modules)
        outputs = [n for n in tree_leaves(forward.output_node().args) if isinstance(n, fx.Node)]
        by_name = {node.name: node for node in outputs if node.op == "call_function"}
        times = Counter(s for node in outputs for s in storages(node))
        times.update(s for n in forward.find_nodes(op="placeholder") for s in storages(n))
        for given in backward.find_nodes(op="placeholder"):
            value = by_name.get(given.name)
            if value is None or is_tangent(given) or not given.users:
                continue
            [size, *others] = storages(value).values() or [0]
            if (
                size >= self.link.least
                and not others
                and all(times[s] == 1 for s in storages(value))
                and _is_whole(value.meta["val"], size)
                and given.meta["val"].device == value.meta["val"].device
            ):
                yield Saved(value, given, size)

    def _out(self, chosen: Sequence[Saved]) -> dict[Saved, float] | None:
        """Return when each copy to the host ends; None where one does not within forward."""
        free, ends = 0.0, {}
        for saved in sorted(chosen, key=lambda saved: self.forward.places[saved.value]):
            free = max(free, self.forward.finish[self.forward.places[saved.value]])
            free += self._duration(saved, self.link.to_host)
            ends[saved] = free
        return ends if free <= self.forward.finish[-1] else None

    def _back(self, chosen: Sequence[Saved]) -> dict[Saved, float] | None:
        """Return when each copy from the host begins, as late as it may; None where one would have
        to before backward does."""
        busy, starts = math.inf, {}
        for saved in sorted(chosen, key=lambda s: -self.backward.first_use(s.given)):
            read = self.backward.finish[self.backward.first_use(saved.given) - 1]
            busy = min(busy, read) - self._duration(saved, self.link.from_host)
            starts[saved] = busy
        return starts if busy >= 0 else None

    def _duration(self, saved: Saved, rate: float) -> float:
        return saved.bytes * _RESERVE * self.link.device / rate

    def _send(self, graph: fx.Graph, saved: Saved, end: float) -> fx.Node:
        """Copy a value to the host from where it is computed on; it is kept until the copy ends."""
        with graph.inserting_after(saved.value):
            ticket = graph.call_function(COPY_START, (saved.value, _HOST, None))
        with graph.inserting_before(self.forward.behind(end, self.forward.ends(saved.value))):
            sent: fx.Node = graph.call_function(COPY_END, (ticket, saved.value, _HOST))
        _describe(ticket, sent, saved.value.meta["val"], _HOST)
        output = graph.output_node()
        output.args = fx.node.map_arg(output.args, lambda n: sent if n is saved.value else n)
        return sent

    def _fetch(self, graph: fx.Graph, saved: Saved, start: float) -> None:
        """Copy a value from the host, early enough for what reads it first."""
        whole = saved.value.meta["val"]
        first = min(saved.given.users, key=self.backward.places.__getitem__)
        anchor = self.backward.anchor(start)
        readers = list(saved.given.users)
        with graph.inserting_after(anchor or self.backward.last_input):
            ticket = graph.call_function(COPY_START, (saved.given, whole.device, anchor))
        with graph.inserting_before(first):
            fetched = graph.call_function(COPY_END, (ticket, saved.given, whole.device))
        for reader in readers:
            reader.replace_input_with(saved.given, fetched)
        _describe(ticket, fetched, whole, whole.device)
        fetched.meta["val"] = whole


class _Times:
    """When the nodes of a graph run, before it is edited."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.places = {node: i for i, node in enumerate(self.nodes)}
        self.finish = finish_times(graph)
        [*_, self.last_input] = graph.find_nodes(op="placeholder")
        kinds = Kinds()
        written = {n for n in self.nodes if n.op != "output" and not kinds.is_fused(n)}
        last: dict[fx.Node, int] = {}
        self._ends: dict[int, int] = {}
        for node in reversed(self.nodes[:-1]):
            readers = [user for user in node.users if user.op != "output"]
            uses = [self.places[n] if n in written else last[n] for n in readers]
            last[node] = max(self.places[node], *uses, 0)
            for storage in storages(node):
                self._ends[storage] = max(last[node], self._ends.get(storage, 0))
        # Behind these a copy may begin: what takes time, and is a buffer of its own anyway.
        self._anchors = [
            node
            for node in self.nodes
            if node in written
            and node.op == "call_function"
            and not kinds.is_fusible(node)
            and isinstance(node.meta.get("val"), torch.Tensor)
            and node_bytes(node)
            and cost_of(node)
        ]
        self._anchored = [self.finish[self.places[node]] for node in self._anchors]

    def first_use(self, given: fx.Node) -> int:
        return min(self.places[user] for user in given.users)

    def ends(self, value: fx.Node) -> int:
        """Return the place of the last reader of a value's storage, but for the output."""
        return max(self._ends[storage] for storage in storages(value))

    def behind(self, time: float, place: int) -> fx.Node:
        """Return the node before which both a time and a place are over."""
        over = bisect.bisect_left(self.finish, time)
        node: fx.Node = self.nodes[min(max(over, place) + 1, len(self.nodes) - 1)]
        return node

    def anchor(self, time: float) -> fx.Node | None:
        """Return the last node that a copy may begin behind to begin by a time."""
        count = bisect.bisect_right(self._anchored, time)
        return self._anchors[count - 1] if count else None


def _is_whole(value: Any, size: int) -> bool:
    """Whether a tensor is all of its storage, each element once."""
    if type(value) is not torch._subclasses.FakeTensor or value.layout is not torch.strided:
        return False
    dims = sorted(
        (hint(stride), hint(length))
        for stride, length in zip(value.stride(), value.shape, strict=True)
        if hint(length) != 1
    )
    expected = 1
    for stride, length in dims:
        if stride != expected:
            return False
        expected *= length
    return expected * value.itemsize == size and not value.is_conj() and not value.is_neg()


def _describe(ticket: fx.Node, copy: fx.Node, of: Any, to: torch.device) -> None:
    """Give a copy's nodes their fake values."""
    with of.fake_mode:
        ticket.meta["val"] = torch.empty(0)
        copy.meta["val"] = torch.empty_strided(of.shape, of.stride(), dtype=of.dtype, device=to)
