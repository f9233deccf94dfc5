"""Plan what backward computes again, so that a step stays within a budget of memory.

`qfuse.memory` is the budget. Plans are steps of one ladder, from what functorch keeps by default to
all that can be computed again, the cheapest first:

0. functorch's own partition;
1. element-wise results are computed again from what they come from;
2. products, attention and other expensive operations as well, in the order of their cost by byte:
   a growing share of the bytes that such operations hold.

Each step is partitioned by functorch's min-cut and simulated (`inductor_q.liveness`). The first
step of the ladder that fits is taken, then the first that fits of those between it and the step
before; where none fits, the one with the lowest peak. Which steps there are does not depend on the
budget, so a lower budget never plans a higher peak.

functorch's own knapsack (`activation_memory_budget`) is not used: it counts an operation that it
has no formula for as free, may draw a seed again, and knows bytes that are kept, not the peak
(pytorch#197838). What a checkpoint or a pass has decided about a value is left as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import OpTypes, get_default_op_list
from torch.utils.checkpoint import CheckpointPolicy

from inductor_q.capture.example import example, hint
from inductor_q.context import Context
from inductor_q.liveness import Liveness, simulate, storages, tensor_bytes
from inductor_q.passes.extend_k import EXTEND_DROPPED, WIDE
from inductor_q.passes.fuse_dropout import PROJECT
from inductor_q.passes.fuse_scatter2scatter import SCATTER2SCATTER
from inductor_q.passes.graph import ADD, VIEWS, is_tangent
from inductor_q.passes.keep_packed import computed_from_inputs, static_inputs
from inductor_q.records import MemoryRecord
from inductor_q.resolved import Budget

aten = torch.ops.aten
FLEX = torch.ops.higher_order.flex_attention

#: Products, and which argument has the summed dimension as its last.
_PRODUCTS: Mapping[object, int] = {
    aten.mm.default: 0,
    aten.bmm.default: 0,
    aten._scaled_mm.default: 0,
    aten._grouped_mm.default: 0,
    aten.addmm.default: 1,
    aten.baddbmm.default: 1,
}

Pair = tuple[fx.GraphModule, fx.GraphModule]

#: The steps of the ladder are this many, in intervals of `_FINE`.
_STEPS, _FINE = 16, 4

#: How many operations of a product take as long as one byte of memory traffic, within a factor of
#: two on the GPUs of the last ten years. Attention computes at half of a product's rate.
_OPERATIONS_BY_BYTE = 200
_ATTENTION = 2

#: What lets functorch compute element-wise results again, if that keeps less.
_FREED = {
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
    "ban_recompute_materialized_backward": False,
}


@dataclass(frozen=True)
class Plan:
    """One step of the ladder: both graphs, and what the simulation says of them."""

    step: int
    pair: Pair
    forward: Liveness
    backward: Liveness
    saved: int
    recomputed: int

    @property
    def peak(self) -> int:
        return max(self.forward.peak, self.backward.peak)


def measure(
    total: int, device: torch.device, inputs: Iterable[object], difference: int = 0
) -> Budget:
    """Return the budget of a graph that is to be compiled. Beside it there is what the GPU has
    allocated by now or, on a CPU, the graph's inputs, and what its steps took beyond their plan."""
    if device.type == "cuda":
        return Budget(total, torch.cuda.memory_allocated(device), difference)
    return Budget(total, sum(tensor_bytes(inputs).values()), difference)


def plan(
    partition: Callable[[fx.GraphModule], Pair], gm: fx.GraphModule, context: Context
) -> tuple[Pair, MemoryRecord]:
    """Partition `gm` so that its tensors take no more than the budget leaves."""
    budget = context.budget
    assert budget is not None
    ladder = _Ladder(partition, gm, static_inputs(gm.graph, context))
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
    )


class _Ladder:
    """Make the steps that are asked for, each once."""

    def __init__(
        self,
        partition: Callable[[fx.GraphModule], Pair],
        gm: fx.GraphModule,
        static: set[fx.Node],
    ) -> None:
        self.partition = partition
        self.gm = gm
        # A product that is computed again reads its weight in the form that forward made of it: a
        # wide one with the adapter, a cast. Those are made again too.
        self.weights = {
            node.name
            for node in computed_from_inputs(gm.graph, static)
            if node.op == "call_function" and "recompute" not in node.meta
        }
        self.made: dict[int, Plan] = {}
        self.ops = get_default_op_list()
        self.candidates = self._candidates(self.at(0).pair[1].graph)
        self.names = {node.name for node in self.candidates}
        self.total = sum(map(_bytes, self.candidates))

    def choose(self, limit: int) -> Plan:
        """Return the first coarse step that fits, or one between it and the coarse one before.

        A step between is taken only where its peak is above that of the coarse one behind it: then
        what a lower limit takes is lower. Where no coarse step fits, any other that does is taken,
        or else the lowest of all.
        """
        coarse = (0, 1, *range(1 + _FINE, _STEPS + 2, _FINE))
        for before, step in zip((0, *coarse), coarse, strict=False):
            if (found := self.at(step)).peak <= limit:
                between = map(self.at, range(before + 1, step))
                return next((p for p in between if found.peak < p.peak <= limit), found)
        every = map(self.at, range(_STEPS + 2))
        fits = next((p for p in every if p.peak <= limit), None)
        return fits or min(self.made.values(), key=lambda plan: (plan.peak, plan.step))

    def at(self, step: int) -> Plan:
        if step not in self.made:
            self.made[step] = self.make(step)
        return self.made[step]

    def make(self, step: int) -> Plan:
        gm = copy.deepcopy(self.gm)
        again = set() if step < 2 else self.weights | self._share((step - 1) / _STEPS)
        for node in gm.graph.nodes:
            if node.name in again:
                node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            elif step and node.name in self.names:
                _keep_sum(node)
        with functorch_config.patch(_FREED if step else {}):
            forward, backward = self.partition(gm)
        inputs = {node.name for node in forward.graph.find_nodes(op="placeholder")}
        return Plan(
            step,
            (forward, backward),
            simulate(forward.graph, inputs),
            simulate(backward.graph, inputs),
            saved_bytes(backward.graph, inputs),
            _recomputed_bytes(forward.graph, backward.graph, self.ops),
        )

    def _share(self, share: float) -> set[str]:
        """Name the cheapest candidates that hold this share of the bytes of all."""
        taken, held = set(), 0
        for node in self.candidates:
            if held >= share * self.total:
                break
            taken.add(node.name)
            held += _bytes(node)
        return taken

    def _candidates(self, backward: fx.Graph) -> list[fx.Node]:
        """Find what is kept, or what it is cheaply computed from, that could be computed again."""
        by_name = {node.name: node for node in self.gm.graph.nodes}
        todo = [by_name[n.name] for n in backward.find_nodes(op="placeholder") if n.name in by_name]
        seen, found = set(todo), []
        while todo:
            node = todo.pop()
            if node.op != "call_function" or "recompute" in node.meta or node.name in self.weights:
                continue
            if _is_expensive(node, self.ops):
                if (cost := cost_of(node)) is not None and _bytes(node):
                    found.append((cost / _bytes(node), node))
                continue
            new = [a for a in node.all_input_nodes if a not in seen]
            seen.update(new)
            todo += new
        order = {node: i for i, node in enumerate(self.gm.graph.nodes)}
        # Equal ones from the front: what early layers compute again comes late in backward, when
        # what the others keep is gone.
        found.sort(key=lambda item: (float(f"{item[0]:.2g}"), order[item[1]]))
        return [node for _, node in found]


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
    if total.target is ADD and "recompute" not in total.meta and _bytes(total) == _bytes(node):
        total.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _recomputed_bytes(forward: fx.Graph, backward: fx.Graph, ops: OpTypes) -> int:
    """Sum up the results of expensive operations that backward computes again."""
    computed = {node.name for node in forward.nodes if node.op == "call_function"}
    return sum(
        _bytes(node)
        for node in backward.nodes
        if node.op == "call_function"
        and node.name in computed
        and _is_expensive(node, ops)
        and node.meta.get("recompute") is not CheckpointPolicy.MUST_RECOMPUTE
    )


def _is_expensive(node: fx.Node, ops: OpTypes) -> bool:
    """Whether functorch would keep the result rather than compute it again."""
    return node.op == "call_function" and not ops.is_recomputable(node) and not ops.is_view(node)


def _bytes(node: fx.Node) -> int:
    return sum(storages(node).values())


def cost_of(node: fx.Node) -> float | None:
    """Return how long an operation takes, in bytes of memory traffic; None where it is unknown or
    where computing it again would give something else."""
    name = getattr(node.target, "__name__", "")
    moved = _bytes(node) + sum(map(_bytes, node.all_input_nodes))
    if node.target is aten.embedding.default:
        moved = 2 * _bytes(node)
    if name.startswith("_scaled_dot_product_") or node.target is FLEX:
        query, key = (example(node.args[i]) for i in (0, 1))
        operations = 4 * query.numel() * key.shape[-2] * _ATTENTION
    elif node.target is SCATTER2SCATTER:
        result, _ = node.meta["val"]
        operations = 2 * hint(result.numel()) * hint(example(node.args[0]).shape[-1])
    elif node.target in (PROJECT, EXTEND_DROPPED):
        operations = 2 * example(node.args[0]).numel() * example(node.args[3]).shape[0]
    elif (place := _PRODUCTS.get(node.target)) is not None:
        operations = 2 * example(node).numel() * example(node.args[place]).shape[-1]
    elif node.target is aten.convolution.default or torch.Tag.nondeterministic_seeded in getattr(
        node.target, "tags", ()
    ):
        return None
    elif getattr(node.target, "namespace", "") in ("aten", "prims") or node.target in WIDE:
        operations = 0
    else:
        return None
    return float(max(moved, operations / _OPERATIONS_BY_BYTE))
