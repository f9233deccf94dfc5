"""Plan what backward computes again, so that a step stays within a budget of memory.

`qfuse.memory` is the budget. Plans are steps of one ladder, from what functorch keeps by default to
all that can be computed again, the cheapest first:

0. functorch's own partition;
1. element-wise results are computed again from what they come from;
2. with a link to the host that hides it, some of what is kept is offloaded, in four steps
   (`inductor_q.offload`), and in all that follow;
3. what only products, attention and other expensive operations can compute again: a growing share
   of those bytes. The next is what costs the least time for a byte, with all that has to be
   computed for it, among what backward reads after the peak that is left by then.

Each step is partitioned by functorch's min-cut and simulated (`inductor_q.liveness`). Of every
fourth step the first that fits is found, and a step before it taken that fits too and has a higher
peak; where none fits, the one with the lowest peak. Which steps there are does not depend on the
budget, so a lower budget never plans a higher peak.

functorch's own knapsack (`activation_memory_budget`) is not used: it counts an operation that it
has no formula for as free, may draw a seed again, and knows bytes that are kept, not the peak
(pytorch#197838). What a checkpoint or a pass has decided about a value is left as it is.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import OpTypes, get_default_op_list
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from inductor_q.context import Context
from inductor_q.cost import cost_of, node_bytes
from inductor_q.inductor_config import REUSE
from inductor_q.kernels.dispatch import preferring
from inductor_q.liveness import COPY_START, Liveness, simulate, storages, tensor_bytes
from inductor_q.offload import COPY_END, Offload, Saved
from inductor_q.passes.graph import ADD, VIEWS, backward_nodes, is_tangent, written_inputs
from inductor_q.passes.keep_packed import computed_from_inputs, static_inputs
from inductor_q.records import MemoryRecord
from inductor_q.resolved import Budget, Link

Pair = tuple[fx.GraphModule, fx.GraphModule]
EXPERTS = "scatter2scatter"

#: The steps of the ladder are this many behind the first two, in intervals of `_FINE`; where there
#: is a link to the host, so many more come before.
_STEPS, _FINE, _OFFLOADING = 16, 4, 4

#: What lets functorch compute element-wise results again, if that keeps less.
_FREED = {
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
    "ban_recompute_materialized_backward": False,
}

#: What a graph with a budget is compiled with: its nodes in their order, and each buffer freed
#: where it ends, as simulated. Inductor's own estimate of the peak counts twice what is written
#: into a concatenation. By it, Inductor decodes the weights of all layers before the first one, and
#: keeps buffers that have ended for later ones of their size.
PATCHES = {REUSE: False, "reorder_for_peak_memory": False}


@dataclass(frozen=True)
class Plan:
    """One step of the ladder: both graphs, and what the simulation says of them."""

    step: int
    pair: Pair
    forward: Liveness
    backward: Liveness
    saved: int
    recomputed: int
    offloaded: tuple[Saved, ...] = ()

    @property
    def peak(self) -> int:
        return max(self.forward.peak, self.backward.peak)


def measure(
    total: int, device: torch.device, inputs: Iterable[object], difference: int = 0
) -> Budget:
    """Return the budget of a graph that is to be compiled. Beside it there is what the GPU has
    allocated by now or, on a CPU, the graph's inputs, and what its steps took beyond their plan."""
    given = sum(tensor_bytes(inputs).values())
    base = torch.cuda.memory_allocated(device) if device.type == "cuda" else given
    return Budget(total, base, difference, inputs=given)


def plan(
    partition: Callable[[fx.GraphModule], Pair], gm: fx.GraphModule, context: Context
) -> tuple[Pair, MemoryRecord]:
    """Partition `gm` so that its tensors take no more than the budget leaves."""
    budget = context.budget
    assert budget is not None
    _keep_what_was_overwritten(gm.graph)
    link = budget.link if isinstance(budget.link, Link) else None
    ladder = _Ladder(partition, gm, static_inputs(gm.graph, context), link)
    with preferring(EXPERTS, context.kernel(EXPERTS)):  # what they take depends on who serves them
        chosen = ladder.choose(budget.limit)
        if chosen.step != next(reversed(ladder.made)):
            chosen = ladder.make(chosen.step)  # who observes partitions takes the last for the one
    return chosen.pair, MemoryRecord(
        budget=budget.total,
        base=budget.base,
        limit=budget.limit,
        forward=chosen.forward.peak,
        backward=chosen.backward.peak,
        unplanned=ladder.at(0).peak,
        saved=chosen.saved,
        recomputed=chosen.recomputed,
        difference=budget.difference,
        offloaded=sum(saved.bytes for saved in chosen.offloaded),
        link=f"nothing offloaded: {budget.link}" if link is None and budget.link else _said(link),
    )


def _keep_what_was_overwritten(graph: fx.Graph) -> None:
    """Save what forward computes from an input and then changes the input.

    Backward would compute it again from the changed input, as functorch's own budget has it.
    """
    backward, ops = backward_nodes(graph), get_default_op_list()
    readers = [user for node in written_inputs(graph) for user in node.users]
    for node in readers:
        is_update = node.target is torch.ops.aten.copy_.default
        if node.op != "call_function" or node in backward or is_update:
            continue
        if ops.is_view(node) or node.target is operator.getitem:  # it changes with the input
            readers += node.users
        else:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


class _Ladder:
    """Make the steps that are asked for, each once."""

    def __init__(
        self,
        partition: Callable[[fx.GraphModule], Pair],
        gm: fx.GraphModule,
        static: set[fx.Node],
        link: Link | None = None,
    ) -> None:
        self.partition = partition
        self.gm = gm
        self.link = link
        # A product that is computed again reads its weight in the form that forward made of it: a
        # wide one with the adapter, a cast. Those are made again too.
        self.weights = {
            node.name
            for node in computed_from_inputs(gm.graph, static)
            if node.op == "call_function" and "recompute" not in node.meta
        }
        self.made: dict[int, Plan] = {}
        self.ops = get_default_op_list()
        backward = backward_nodes(gm.graph)
        self.expensive = {
            node.name
            for node in gm.graph.nodes
            if node not in backward and node.name not in self.weights and self._is_decided(node)
        }

    def choose(self, limit: int) -> Plan:
        """Return the first coarse step that fits, or one between it and the coarse one before.

        A step between is taken only where its peak is above that of the coarse one behind it: then
        what a lower limit takes is lower. Where no coarse step fits, any other that does is taken,
        or else the lowest of all.
        """
        coarse = (0, 1, *range(1 + _FINE, self.count, _FINE))
        for before, step in zip((0, *coarse), coarse, strict=False):
            if (found := self.at(step)).peak <= limit:
                between = map(self.at, range(before + 1, step))
                return next((p for p in between if found.peak < p.peak <= limit), found)
        every = map(self.at, range(self.count))
        fits = next((p for p in every if p.peak <= limit), None)
        return fits or min(self.made.values(), key=lambda plan: (plan.peak, plan.step))

    @property
    def first(self) -> int:
        """The last step that computes nothing expensive again."""
        return 1 + (_OFFLOADING if self.link is not None else 0)

    @property
    def count(self) -> int:
        return 1 + self.first + _STEPS

    def at(self, step: int) -> Plan:
        if step not in self.made:
            self.made[step] = self.make(step)
        return self.made[step]

    def make(self, step: int) -> Plan:
        gm = copy.deepcopy(self.gm)
        behind = step - self.first
        again, moved = set(), []
        if behind > 0:
            left = self._share(behind / _STEPS)
            again = self.weights | {node.name for value in left for node in value.needs}
            moved = self._offloaded({value.name for value in left})
        for node in gm.graph.nodes:
            if node.name in again:
                node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            elif node.name in moved:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            elif step and node.name in self.expensive:
                _keep_sum(node)
        with functorch_config.patch(_FREED if step else {}):
            forward, backward = self.partition(gm)
        chosen: list[Saved] = []
        beside = {node.name for node in forward.graph.find_nodes(op="placeholder")}
        if self.link is not None and step > 1:
            offload = Offload(forward, backward, self.link, self._rate)
            chosen = offload.share(min((step - 1) / _OFFLOADING, 1))
            beside |= offload.apply(chosen)
        return Plan(
            step,
            (forward, backward),
            simulate(forward.graph, beside),
            simulate(backward.graph, beside, _given_twice(forward.graph)),
            saved_bytes(backward.graph, beside),
            _recomputed_bytes(forward.graph, backward.graph, self.ops),
            tuple(chosen),
        )

    def _rate(self, name: str) -> float:
        """Return the cost of a byte of a value that is kept, if it were computed again."""
        if (node := self.by_name.get(name)) is None:
            return math.inf
        return self.rates.get(self._source(node).name, math.inf)

    @functools.cached_property
    def rates(self) -> dict[str, float]:
        return {value.name: value.rate(()) for value in self._kept(self.at(1))}

    @functools.cached_property
    def by_name(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.gm.graph.nodes}

    def _share(self, share: float) -> list[_Kept]:
        """Return what has to be computed again for this share of the bytes that could be."""
        again: list[_Kept] = []
        held, total = 0, sum(value.bytes for value in self.order)
        for value in self.order:
            if held >= share * total:
                break
            again.append(value)
            held += value.bytes
        return again

    def _offloaded(self, but: Collection[str] = ()) -> list[str]:
        """Name what is offloaded before anything expensive is computed again, but for some."""
        names = (saved.value.name for saved in self.at(self.first).offloaded)
        return [name for name in names if self._source(self.by_name[name]).name not in but]

    @functools.cached_property
    def order(self) -> list[_Kept]:
        """Sort what is kept: the next one is what takes the least time for a byte of those that
        lower the peak, which is then another.

        A value lowers it that backward reads later. Equal ones are taken from the front: what early
        layers compute again comes late in backward, when what the others keep is gone. What can be
        offloaded instead comes last.
        """
        first, sorted_ = self.at(self.first), []
        left, held = self._kept(first), first.backward.held
        moved = {self._source(self.by_name[name]).name for name in self._offloaded()}
        again: set[fx.Node] = set()
        while left:
            peak = held.index(max(held))
            staying = [value for value in left if value.name not in moved] or left
            useful = [value for value in staying if value.read > peak] or staying
            value = min(useful, key=lambda value: value.rate(again))
            left.remove(value)
            sorted_.append(value)
            again |= value.needs.keys()
            before, behind = held[: value.read], held[value.read :]
            held = (*(size - value.bytes for size in before), *behind)
        return sorted_

    def _kept(self, plan: Plan) -> list[_Kept]:
        """Find what a step keeps and could compute again, in the order of forward."""
        backward = plan.pair[1].graph
        places = {node: i for i, node in enumerate(backward.nodes)}
        read: dict[str, int] = {}
        by_name = self.by_name
        for given in backward.find_nodes(op="placeholder"):
            if given.name in by_name and not is_tangent(given):
                name = self._source(by_name[given.name]).name
                first = min((places[user] for user in given.users), default=len(places))
                read[name] = min(first, read.get(name, first))
        found = []
        for node in self.gm.graph.nodes:
            if node.name in read and node.op == "call_function" and "recompute" not in node.meta:
                needs, instead = self._needs(node, self.weights | read.keys())
                if needs and (freed := node_bytes(node) - instead) > 0:
                    found.append(_Kept(node.name, freed, read[node.name], needs))
        return found

    def _source(self, node: fx.Node) -> fx.Node:
        """Return what a view looks at, or what has several results."""
        while self.ops.is_view(node) or node.target in (operator.getitem, *VIEWS):
            node = node.all_input_nodes[0]
        return node

    def _needs(self, node: fx.Node, known: Collection[str]) -> tuple[dict[fx.Node, float], int]:
        """Find the expensive operations that compute a value from what else is known, at their
        costs, and how many bytes have to be kept for them: what cannot be computed again, as seeds.
        """
        needs, instead = {}, 0
        todo, seen = [node], {node}
        while todo:
            node = todo.pop()
            if self._is_decided(node):
                if (cost := cost_of(node)) is None:
                    instead += node_bytes(node)
                    continue
                needs[node] = cost
            operands = [n for n in node.all_input_nodes if n.op == "call_function"]
            new = [n for n in operands if n not in seen and n.name not in known]
            seen.update(new)
            todo += new
        return needs, instead

    def _is_decided(self, node: fx.Node) -> bool:
        """Whether the ladder says if an operation is computed again."""
        return (
            _is_expensive(node, self.ops)
            and node.target is not operator.getitem
            and "recompute" not in node.meta
        )


@dataclass(frozen=True)
class _Kept:
    """A value that is kept: where backward first reads it, and which operations, at which costs,
    compute it again."""

    name: str
    bytes: int
    read: int
    needs: Mapping[fx.Node, float]

    def rate(self, again: Collection[fx.Node]) -> float:
        """Return the cost of a byte, where some operations are computed again anyway."""
        cost = sum(cost for node, cost in self.needs.items() if node not in again)
        return float(f"{cost / self.bytes:.2g}")


def _said(link: Link | None) -> str:
    if link is None:
        return ""
    rates = (f"{rate / 1e9:g}" for rate in (link.to_host, link.from_host))
    return "link measured at {} GB/s to the host and {} GB/s back".format(*rates)


def _given_twice(forward: fx.Graph) -> set[int]:
    """Find the storages that forward returns more than once: to its caller and to backward."""
    count: Counter[int] = Counter()
    for node in tree_leaves(forward.output_node().args):
        count.update(storages(node).keys() if isinstance(node, fx.Node) else ())
    return {storage for storage, times in count.items() if times > 1}


def saved_bytes(backward: fx.Graph, inputs: Collection[str]) -> int:
    """Sum up what forward keeps for backward, each storage once, inputs left out."""
    given = list(backward.find_nodes(op="placeholder"))
    owned = {s for node in given if node.name in inputs for s in storages(node)}
    kept: dict[int, int] = {}
    for node in given:
        if not is_tangent(node):
            kept |= storages(node)
    return sum(size for storage, size in kept.items() if storage not in owned)


def _keep_sum(node: fx.Node) -> None:
    """Keep, of a product that is not computed again, the sum with the residual that it goes into.

    It is as large. functorch would keep the product, for which backward adds up the residuals of
    all layers at its start.
    """
    total = node
    while len(total.users) == 1 and (user := next(iter(total.users))).target in (ADD, *VIEWS):
        total = user
    same = node_bytes(total) == node_bytes(node)
    if total.target is ADD and "recompute" not in total.meta and same:
        total.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _recomputed_bytes(forward: fx.Graph, backward: fx.Graph, ops: OpTypes) -> int:
    """Sum up the results of expensive operations that backward computes again."""
    computed = {node.name for node in forward.nodes if node.op == "call_function"}
    return sum(
        node_bytes(node)
        for node in backward.nodes
        if node.op == "call_function"
        and node.name in computed
        and node.target not in (COPY_START, COPY_END)
        and _is_expensive(node, ops)
        and node.meta.get("recompute") is not CheckpointPolicy.MUST_RECOMPUTE
    )


def _is_expensive(node: fx.Node, ops: OpTypes) -> bool:
    """Whether functorch would keep the result rather than compute it again."""
    return node.op == "call_function" and not ops.is_recomputable(node) and not ops.is_view(node)
