"""Simulate which tensors a graph holds at a time, to know its peak of memory before it runs.

Nodes are taken in their order. A tensor begins where it is computed and ends behind its last
reader; views share the storage that they look at. Inductor writes fewer tensors than a graph
names, so some rules stand for what it fuses:

- An element-wise result that only element-wise operations and reductions read is never written:
  its readers read its inputs.
- `qfuse::materialize` writes its operand, and is that.
- What only a concatenation reads, or an operand that is widened, is written in its place there; so
  is a decoded weight in each of several (`decode_again`).
- An element-wise result takes the place of an operand that ends with it, where that is the graph's
  to write to: not a gradient that autograd hands over, nor a result of forward, which its caller
  may hold. The sum of `qfuse::add_product` or `add_dropout_grad_x` takes the place of its base, as
  its lowering has it.

A copy between device and host (`inductor_q.offload`) has its memory from its start on, and what is
copied has its own until the end.

Before torch had boxed gradients (`boxed_grads_call`), autograd held those until backward was over.
Of what operations allocate inside, the chunk of logits of `qfuse::linear_cross_entropy` is
simulated, and what products with experts take beside their results: rows, and experts that are
decoded first, in 16 bits or in e4m3. What the allocator loses is not.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import get_default_op_list
from torch._inductor.fx_utils import get_storage
from torch.utils._pytree import tree_leaves

from inductor_q.capture.example import example, hint
from inductor_q.kernels.dispatch import preferred, provider
from inductor_q.kernels.expert_calls import unchecked
from inductor_q.ops.add_product import takes_base
from inductor_q.ops.linear_cross_entropy import rows_of_chunk, slice_of
from inductor_q.passes.add_adapters import ADD_PRODUCT
from inductor_q.passes.add_gradients import ADD_GRAD_X
from inductor_q.passes.extend_k import EXTEND, EXTEND_DROPPED
from inductor_q.passes.fuse_scatter2scatter import SCATTER2SCATTER
from inductor_q.passes.graph import CAT, VIEWS, is_tangent
from inductor_q.passes.products import DEQUANTIZE, MATERIALIZE

_JOINTS = (CAT, EXTEND)
_SUMS = (ADD_PRODUCT, ADD_GRAD_X)
COPY_START = torch.ops.qfuse.copy_start.default
_RANDOM = (torch.ops.prims.inductor_random.default, torch.ops.prims.inductor_lookup_seed.default)
_HOLDS_GRADIENTS = not hasattr(torch.autograd.Function, "boxed_grads_call")


@dataclass(frozen=True)
class Liveness:
    """The most bytes that a graph holds at a time, those at its start and at each of its nodes, and
    the node of the peak.

    What its caller owns (`owned` of `simulate`) is in none of them.
    """

    peak: int
    start: int
    at: fx.Node | None
    held: tuple[int, ...]


def storages(node: fx.Node) -> dict[int, int]:
    """Return the storages of what a node computes, and their bytes."""
    return tensor_bytes(tree_leaves(node.meta.get("val")))


def _begun(node: fx.Node) -> dict[int, int]:
    """Return the storages that a node begins or looks at: a copy's begin where the copy does."""
    ends = node.users if node.target is COPY_START else ()
    return {s: size for end in (node, *ends) for s, size in storages(end).items()}


def tensor_bytes(values: Iterable[object]) -> dict[int, int]:
    """Return the storages of those values that are tensors, and their bytes."""
    found = {}
    for value in values:
        if isinstance(value, torch.Tensor) and torch._C._has_storage(value):
            found[get_storage(value)] = hint(value.untyped_storage().nbytes())
    return found


def simulate(graph: fx.Graph, owned: Collection[str], lent: Collection[int] = ()) -> Liveness:
    """Run through `graph`, whose nodes of these names are not counted: inputs that live anyway, and
    what is in the host's memory.

    Storages that are `lent` are not written to (gradients of results are not, either).
    """
    nodes = list(graph.nodes)
    holds = {node: _begun(node) for node in nodes}
    kinds = Kinds()
    foreign = {s for n in nodes if n.name in owned or n.op == "get_attr" for s in storages(n)}
    written, known = {}, set(foreign)
    for node in nodes:
        new = {s: size for s, size in holds[node].items() if s not in known}
        known |= new.keys()
        if node.op != "output" and not kinds.is_fused(node):
            written[node] = new
    last = _last_uses(nodes, written)
    ends: dict[int, int] = {}
    for node in nodes:
        for storage in holds[node]:
            ends[storage] = max(ends.get(storage, 0), last[node])
    gradients = {s for node in filter(is_tangent, nodes) for s in holds[node]}
    if _HOLDS_GRADIENTS:
        ends |= dict.fromkeys(gradients, len(nodes) - 1)
    sizes = {s: size for new in written.values() for s, size in new.items()}
    dying = defaultdict(list)
    for storage in sizes:
        dying[ends[storage]].append(storage)

    live = start = sum(size for n in nodes if n.op == "placeholder" for size in written[n].values())
    readable = gradients | set(lent)
    held = []
    for i, node in enumerate(nodes):
        new = written.get(node, {}) if node.op != "placeholder" else {}
        freed = sum(sizes[s] for s in dying[i])
        live += sum(new.values())
        in_place = kinds.is_elementwise(node) or (node.target in _SUMS and takes_base(node))
        reused = in_place and any(
            sizes[s] == size
            for s in dying[i]
            if s not in new and s not in readable
            for size in new.values()
        )
        held.append(live - (sum(new.values()) if reused else 0) + workspace(node))
        live -= freed
    peak = max(held, default=0)
    at = nodes[held.index(peak)] if peak > start else None
    return Liveness(max(peak, start), start, at, tuple(held))


def workspace(node: fx.Node) -> int:
    """Return what an operation allocates beside its results, where that is known and large."""
    if node.target is SCATTER2SCATTER:
        call = unchecked(example(node.args))
        return provider(call.op, call, preferred(call.op)).workspace(call)
    if node.target is not torch.ops.qfuse.linear_cross_entropy_chunks.default:
        return 0
    arguments: Sequence[Any] = node.args
    operands, count, labels, _, _, _, elements, wanted = arguments
    values = [operand.meta["val"] for operand in operands]
    rows, columns = hint(labels.meta["val"].shape[0]), hint(values[count].shape[0])
    chunk = min(rows, rows_of_chunk(rows, columns, elements))
    weights, dtype = values[count : 2 * count], values[0].dtype
    others = [hint(w.shape[1]) for w in weights if w.dtype != dtype]
    rounded = slice_of(weights, dtype, rows) * dtype.itemsize + 4 * chunk * max(others, default=0)
    trained = zip(values[count:], wanted[count:], strict=True)
    sums = 4 * sum(hint(v.numel()) for v, wants in trained if wants) if chunk < rows else 0
    return chunk * columns * int(dtype.itemsize) + int(rounded) + sums


def _last_uses(nodes: list[fx.Node], written: Collection[fx.Node]) -> dict[fx.Node, int]:
    """Return the place of each node's last reader, through readers that are not written."""
    places = {node: i for i, node in enumerate(nodes)}
    last: dict[fx.Node, int] = {}
    for node in reversed(nodes):
        last[node] = places[node]
        for user in node.users:
            at = places[user] if user in written or user.op == "output" else last[user]
            last[node] = max(last[node], at)
    return last


class Kinds:
    """Tell what Inductor fuses, by functorch's lists of operations."""

    def __init__(self) -> None:
        self.ops = get_default_op_list()
        self._readers: dict[fx.Node, list[fx.Node]] = {}

    def is_view(self, node: fx.Node) -> bool:
        return node.op == "call_function" and (
            self.ops.is_view(node) or node.target in (operator.getitem, *VIEWS)
        )

    def is_fusible(self, node: fx.Node) -> bool:
        return node.op == "call_function" and (
            node.target in _RANDOM or bool(self.ops.is_fusible(node))
        )

    def is_elementwise(self, node: fx.Node) -> bool:
        """Whether a fusible node is no reduction: those are much smaller than what they read."""
        if not self.is_fusible(node) or self.is_view(node):
            return False
        read = max((_elements(a) for a in node.all_input_nodes), default=0)
        return _elements(node) * 4 >= read

    def is_fused(self, node: fx.Node) -> bool:
        """Whether a node is not written: a view, what has been written already, or a part of each
        of its readers."""
        if self.is_view(node) or node.target is MATERIALIZE:
            return True
        readers = list(self.readers(node))
        if (len(readers) == 1 or node.target is DEQUANTIZE) and all(
            _is_part(node, reader) for reader in readers
        ):
            return node.op == "call_function"
        return (
            self.is_elementwise(node)
            and bool(readers)
            and all(self.is_fusible(r) and not self.is_view(r) for r in readers)
        )

    def readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield what reads a node, through views."""
        for user in node.users:
            if self.is_view(user):
                yield from self.readers(user)
            else:
                yield user


def _is_part(node: fx.Node, joint: fx.Node) -> bool:
    """Whether an operation lays a value beside others; one with dropout also reads seeds and A."""
    if joint.target is EXTEND_DROPPED:
        return storages(node).keys() == storages(joint.all_input_nodes[0]).keys()
    return joint.target in _JOINTS


def _elements(node: fx.Node) -> int:
    value: Any = node.meta.get("val")
    return hint(value.numel()) if isinstance(value, torch.Tensor) else 0
