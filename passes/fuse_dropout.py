"""Adapters under dropout project their input inside one kernel that makes their masks.

PEFT's `lora_dropout` gives each adapter a mask of its own. Written out, that is a copy of the
layer's input for every adapter, in forward for `dropout(x) A'`, in backward for the gradient of A,
and one more for the gradient of x. This pass finds the three places of each mask and replaces all
of them, or none: `qfuse::dropout_project` stands for the adapters of one input,
`qfuse::dropout_grad_a` and `dropout_grad_x` for the gradients of A and x. All make the mask from a
seed, so nothing of it is stored, and the projections of one input lie side by side, as
`stack_adapters` would have laid them, for `extend_k`.

The masks are not those of stock Inductor, which draws its numbers in another order; their
distribution is the same. Where `torch._inductor.config.fallback_random` asks for the
numbers of eager, and under strict numerics, dropout stays as it is written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch._inductor import config, inductor_prims

from inductor_q.context import Context
from inductor_q.passes.fold_lora import STRICT
from inductor_q.passes.graph import (
    ADD,
    CAST,
    CAT,
    CLONE,
    MM,
    MUL,
    PERMUTE,
    RESHAPE,
    SLICE,
    VIEWS,
    arg,
    as_matrix,
    computed_from,
    emit,
    peel_rows,
    peel_transposes,
    positions,
    same_shape,
    tensor,
    too_few_rows,
)
from inductor_q.passes.products import Product, as_product, is_projection, sums
from inductor_q.passes.runner import Site

RAND = torch.ops.aten.rand.default
NATIVE = torch.ops.aten.native_dropout.default  # kept whole where eager's numbers are asked for
GREATER = torch.ops.aten.gt.Scalar
PROJECT = torch.ops.qfuse.dropout_project.default
GRAD_A = torch.ops.qfuse.dropout_grad_a.default
GRAD_X = torch.ops.qfuse.dropout_grad_x.default
EAGER = "torch._inductor.config.fallback_random asks for the numbers of eager"
PROVIDER = "qfuse.dropout_project"


@dataclass(frozen=True)
class _Dropout:
    """One adapter's mask, and the three places where it counts.

    `projection` is `dropout(x) @ A'`; `of_a` is the gradient `dP' @ dropout(x)`; `of_x` is the
    gradient `dropout(dP @ A)`, None where x needs none.
    """

    x: fx.Node
    p: float
    projection: Product
    of_a: fx.Node
    of_x: fx.Node | None
    shape: Any = None  # of `of_x`, as the graph writes it

    @property
    def a(self) -> fx.Node:
        """A, or A transposed, below the right-hand side of the projection."""
        return self.projection.rhs

    @property
    def grad(self) -> fx.Node:
        """The gradient dP [M, r]."""
        return peel_transposes(arg(self.of_a, 0))[0]


@dataclass(frozen=True)
class _Group:
    """The adapters of one input, and which of the graph's seeds is theirs."""

    members: tuple[_Dropout, ...]
    seed: int
    seeds: int


class FuseDropout:
    name: ClassVar[str] = "fuse_dropout"
    stage: ClassVar[str] = "joint"

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        for node in graph.find_nodes(op="call_function", target=NATIVE):
            if _of_an_adapter(node):
                yield Site(node, EAGER, by_choice=True)
        found: list[_Dropout] = []
        for rand in graph.find_nodes(op="call_function", target=RAND):
            dropout = _read(rand)
            if isinstance(dropout, str):
                yield Site(rand, dropout, by_choice=True)
            elif dropout is not None:
                reason = _unwanted(dropout, context)
                if reason:
                    yield Site(dropout.projection.node, reason, by_choice=True)
                else:
                    found.append(dropout)
        groups = _groups(graph, found)
        for seed, members in enumerate(groups):
            plan = _Group(tuple(members), seed, len(groups))
            for i, member in enumerate(members):
                yield Site(member.projection.node, plan=plan if i == 0 else None, provider=PROVIDER)

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        if site.plan is not None:
            _rewrite(graph, site.plan)


# --- finding ------------------------------------------------------------------------------------


def _read(rand: fx.Node) -> _Dropout | str | None:
    """Read what a random number decides as an adapter's dropout.

    Return None where it is no dropout, or that of no adapter, and a reason where not all of its
    places are those of an adapter.
    """
    mask = _only_user(rand, CAST)
    if mask.target is not GREATER or not isinstance(mask.args[1], float):
        return None
    p = mask.args[1]
    forward = [user for user in mask.users if user.target is MUL]
    if len(forward) != 1 or not 0 <= p < 1:
        return None
    if not same_shape(rand, forward[0]):
        return None  # a mask that is broadcast drops whole rows or columns
    scaled = _only_user(forward[0])
    if not _is_scaled(scaled, p):
        return None
    dropped = _last(scaled, CAST)
    products = _products(dropped)
    projections = [
        q for m in products if (q := as_product(m)) is not None and _projects(q, dropped)
    ]
    if not projections:
        return None
    of_a = [m for m in products if m is not projections[0].node]
    if len(projections) > 1 or len(of_a) > 1 or _readers(dropped) != set(products):
        return "what dropout leaves of the input is read by more than its adapter"
    if not of_a:
        return "no gradient of the adapter's A is computed"
    projection = projections[0]
    left, transposed = peel_transposes(arg(of_a[0], 0))
    if not transposed or tensor(left).shape[1] != projection.cols:
        return "the gradient of A is not the product of two matrices"
    x = arg(forward[0], 0) if arg(forward[0], 1) is mask else arg(forward[0], 1)
    x = _in_dtype(x, tensor(dropped).dtype)
    backward = [user for user in mask.users if user is not forward[0]]
    if not backward:
        return _Dropout(x, p, projection, of_a[0], None)
    of_x = _of_x(backward, p, left, projection)
    if of_x is None:
        return "the gradient of the input is not that of one adapter"
    return _Dropout(x, p, projection, of_a[0], *of_x)


def _of_an_adapter(native: fx.Node) -> bool:
    dropped = next((user for user in native.users if user.args[1] == 0), native)
    return any(
        product is not None and _projects(product, _last(dropped, CAST))
        for product in map(as_product, _products(_last(dropped, CAST)))
    )


def _of_x(
    backward: Sequence[fx.Node], p: float, grad: fx.Node, projection: Product
) -> tuple[fx.Node, Any] | None:
    """Find `dropout(dP @ A)` and its shape; `backward` are the nodes that read the mask for it."""
    factor = _only_user(backward[0]) if backward[0].target is CAST else backward[0]
    if len(backward) > 1 or not _is_scaled(factor, p):
        return None
    times = _only_user(factor)
    if times.target is not MUL:
        return None
    below = arg(times, 0) if arg(times, 1) is factor else arg(times, 1)
    shape = None
    while below.target is CAST or below.target in VIEWS:
        if len(below.users) > 1:
            return None
        if below.target in VIEWS and shape is None:
            shape = below.args[1]
        below = arg(below, 0)
    product = as_product(below)
    if product is None or len(below.users) > 1:
        return None
    a, transposed = peel_transposes(projection.rhs)
    back, back_transposed = peel_transposes(product.rhs)
    if back is not a or back_transposed is transposed or product.x is not peel_rows(grad):
        return None
    return _last(times, CLONE, CAST), shape


def _in_dtype(x: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Return the value that the base layer reads: below a cast to what dropout computes in, or the
    first of the casts to what the adapter computes in. Else x, which is cast when the pass is
    applied."""
    source = x
    if x.target is CAST and dtype in (tensor(x).dtype, tensor(arg(x, 0)).dtype):
        source = arg(x, 0)
    if tensor(source).dtype == dtype:
        return source
    casts = (user for user in source.users if user.target is CAST and user.args[1] == dtype)
    return next(casts, x)


def _is_scaled(node: fx.Node, p: float) -> bool:
    factor = node.args[1] if node.target is MUL and len(node.args) == 2 else None
    return isinstance(factor, float) and abs(factor * (1 - p) - 1) < 1e-6


def _only_user(node: fx.Node, *skipped: object) -> fx.Node:
    """The one user of a node, below `skipped` targets; the node itself where there are more."""
    user = node
    while len(user.users) == 1:
        user = next(iter(user.users))
        if user.target not in skipped:
            break
    return user


def _last(node: fx.Node, *targets: object) -> fx.Node:
    """The last of the nodes with these targets that follow as the only user of the one before."""
    while len(node.users) == 1 and next(iter(node.users)).target in targets:
        node = next(iter(node.users))
    return node


def _readers(node: fx.Node) -> set[fx.Node]:
    """The nodes that read `node` through views that regroup its rows."""
    found: set[fx.Node] = set()
    for user in node.users:
        regroups = user.target in VIEWS and peel_rows(user) is not user
        found |= _readers(user) if regroups else {user}
    return found


def _products(node: fx.Node) -> list[fx.Node]:
    return [reader for reader in _readers(node) if reader.target is MM]


def _projects(product: Product, dropped: fx.Node) -> bool:
    return product.x is peel_rows(dropped) and is_projection(product)


def _unwanted(found: _Dropout, context: Context) -> str:
    if context.numerics == "strict":
        return STRICT
    if getattr(config, "align_random_eager", False):
        return EAGER
    if config.cpp_wrapper:
        return "C++ wrapper code calls no Python, in which the kernels are launched"
    value = tensor(found.projection.node)
    if value.device.type == "cuda" and value.dtype.itemsize != 2:
        return f"the kernels compute in 16 bits, the adapter in {value.dtype}"
    if reason := too_few_rows(found.projection.node, "fuse_dropout.min_rows", context):
        return reason
    return ""


def _groups(graph: fx.Graph, found: Sequence[_Dropout]) -> list[list[_Dropout]]:
    """Group what shares an input, a rank, a dtype and a rate, and adds up its gradients of the
    input."""
    roots = {leaf: root for root, leaves in sums(graph) for leaf in leaves} if found else {}
    groups: dict[object, list[_Dropout]] = defaultdict(list)
    for dropout in found:
        of_x, root = dropout.of_x, None
        if of_x is not None:
            root = roots.get(of_x)
            alike = root and same_shape(root, of_x) and tensor(root).dtype == tensor(of_x).dtype
            root = root if alike and len(of_x.users) == 1 else of_x
        kind = dropout.p, dropout.projection.cols, tensor(dropout.projection.node).dtype
        groups[peel_rows(dropout.x), kind, root].append(dropout)
    order = positions(graph) if groups else {}
    split: list[list[_Dropout]] = []
    for members in groups.values():
        apart = _chained(members, order)
        split += [[member] for member in members] if apart else [members]
    return split


def _chained(members: Sequence[_Dropout], order: Mapping[fx.Node, int]) -> bool:
    """Whether one's operands are computed from another's results, as in no model that we know."""
    projections = [m.projection.node for m in members]
    gradients = [n for m in members for n in (m.of_a, m.of_x) if n is not None]
    return computed_from([m.a for m in members], projections, order) or computed_from(
        [m.grad for m in members], gradients, order
    )


# --- rewriting ----------------------------------------------------------------------------------


def _rewrite(graph: fx.Graph, plan: _Group) -> None:
    members = plan.members
    first, count, rank = members[0], len(members), members[0].projection.cols
    node = first.projection.node
    with graph.inserting_before(node):
        seeds = _seeds(graph, plan, node)
        dtype = tensor(node).dtype
        x = as_matrix(graph, _cast(graph, first.x, dtype, node))
        a = _joined(graph, [_row_major(graph, m) for m in members], 0)
        projected = emit(graph, PROJECT, (x, seeds, plan.seed, a, count, first.p), node)
        for i, member in enumerate(members):
            part = _part(graph, projected, 1, i, count, rank, member.projection.node)
            member.projection.node.replace_all_uses_with(part)
    with graph.inserting_before(members[-1].of_a):
        like = members[-1].of_a
        grad = _joined(graph, [as_matrix(graph, m.grad) for m in members], 1)
        rest = (seeds, plan.seed, grad, count, first.p)
        of_a = emit(graph, GRAD_A, (x, *rest), like)
        for i, member in enumerate(members):
            part = _part(graph, of_a, 0, i, count, rank, member.of_a)
            member.of_a.replace_all_uses_with(part)
        if first.of_x is not None:
            of_x = emit(graph, GRAD_X, (a, *rest), first.of_x)
            of_x = _cast(graph, of_x, tensor(first.of_x).dtype, first.of_x)
            if first.shape is not None:
                of_x = emit(graph, RESHAPE, (of_x, first.shape), first.of_x)
            for member in members[1:]:
                _leave_out(member.of_x)
            first.of_x.replace_all_uses_with(of_x)


def _cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
    return node if tensor(node).dtype == dtype else emit(graph, CAST, (node, dtype), like)


def _seeds(graph: fx.Graph, plan: _Group, like: fx.Node) -> fx.Node:
    """The seeds of all groups on one device, drawn in one launch."""
    device = tensor(like).device
    for node in graph.find_nodes(op="call_function", target=inductor_prims.seeds):
        if node.args == (plan.seeds, device):
            assert isinstance(node, fx.Node)
            return node
    node = emit(graph, inductor_prims.seeds, (plan.seeds, device), like)
    node.meta.pop("recompute", None)  # backward needs the same numbers
    return node


def _row_major(graph: fx.Graph, member: _Dropout) -> fx.Node:
    below, transposed = peel_transposes(member.a)
    return below if transposed else emit(graph, PERMUTE, (below, [1, 0]), member.projection.node)


def _joined(graph: fx.Graph, parts: Sequence[fx.Node], dim: int) -> fx.Node:
    return parts[0] if len(parts) == 1 else emit(graph, CAT, (list(parts), dim), parts[0])


def _part(
    graph: fx.Graph, whole: fx.Node, dim: int, i: int, count: int, rank: int, like: fx.Node
) -> fx.Node:
    return whole if count == 1 else emit(graph, SLICE, (whole, dim, i * rank, (i + 1) * rank), like)


def _leave_out(term: fx.Node | None) -> None:
    """Take a term out of the sum that it is in."""
    assert term is not None, "all gradients of a group's input are terms of one sum"
    # An addition that another group has taken out still reads it, and nobody reads that.
    add = next(user for user in term.users if user.users)
    assert add.target is ADD, f"{add=}"
    add.replace_all_uses_with(arg(add, 0) if arg(add, 1) is term else arg(add, 1))
