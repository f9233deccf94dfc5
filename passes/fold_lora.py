"""Clean up what PEFT puts around an adapter: the clone, the [M, N] scaling, the float32 detour.

- A `clone` of a product that has just been computed, and casts to float32 and back are dropped.
  Where each layer and adapter of one input casts it on its own, one cast serves all products.
- `(P * s) @ Q` and `(P @ Q) * s`: the factor moves to the adapter's parameter, or to the smallest
  of P, Q and the product: [N, r] or [M, r] instead of an [M, N] activation. A factor of 1 vanishes.
  The result is rounded once less; it is bitwise equal when s is a power of two, as PEFT's alpha / r
  mostly is.
- float32 products of an upcast 16-bit activation with a small adapter are computed in the 16-bit
  dtype, under `qfuse.numerics="relaxed"` only, since the gradients of A and B lose float32
  precision.

Numerics "strict" keeps every product as written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from inductor_q import capture
from inductor_q.capture.example import hint
from inductor_q.context import Context
from inductor_q.passes.graph import (
    ADD,
    CAST,
    CLONE,
    MM,
    MUL,
    PERMUTE,
    VIEWS,
    arg,
    emit,
    is_tangent,
    is_tensor,
    is_view,
    replay,
    tensor,
    widens,
    written_inputs,
)
from inductor_q.passes.products import MAX_RANK, as_scaled
from inductor_q.passes.runner import Site

#: The layouts that products are moved through: graph.LAYOUT without what copies or repeats.
LAYOUT = VIEWS | {PERMUTE}
WRITTEN = "forward writes to what is multiplied: backward would read other numbers"
STRICT = "qfuse.numerics='strict' keeps every product as written"
FLOAT32 = (
    "float32 adapter on a 16-bit activation: its products stay float32 "
    "(autocast, 16-bit adapters or qfuse.numerics='relaxed' let them join the main product)"
)


@dataclass(frozen=True)
class _Drop:
    """The node has the value of its input or, if it is a cast, of what that was cast from."""


@dataclass(frozen=True)
class _Same:
    """The node has the value of `first`, which comes before it."""

    first: fx.Node


@dataclass(frozen=True)
class _MoveScale:
    """`scaled` (= `plain` * `factor`) is an input or the output of the product `mm`."""

    scaled: fx.Node
    factor: float | fx.Node
    mm: fx.Node
    is_output: bool

    @property
    def plain(self) -> fx.Node:
        """The unscaled tensor as it is now: moving another factor may have replaced it."""
        mul = self.scaled if self.scaled.target is MUL else arg(self.scaled, 0)
        return arg(mul, 0)


@dataclass(frozen=True)
class _Demote:
    mm: fx.Node
    dtype: torch.dtype


class FoldLora:
    name: ClassVar[str] = "fold_lora"
    stage: ClassVar[str] = "joint"

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        demoted: dict[fx.Node, torch.dtype] = {}
        scalars: dict[fx.Node, fx.Node] = {}
        casts: dict[object, fx.Node] = {}
        trains = any(map(is_tangent, graph.find_nodes(op="placeholder")))
        written = written_inputs(graph) if trains else set()
        scales: list[Site] = []  # moved when nothing but layout stands between them and a product
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            if node.target is CLONE and _is_product(node.args[0]) and not node.kwargs:
                if not _is_returned(node):
                    yield Site(node, plan=_Drop())
            elif node.target is CAST and _casts_nothing(node) and not _is_returned(node):
                if _shown(node) not in written:
                    yield Site(node, plan=_Drop())
            elif node.target is CAST and (first := _alike(node, casts)) is not node:
                yield Site(node, plan=_Same(first))
            elif is_tensor(node) and (found := as_scaled(node)) is not None:
                plain, factor = found
                if isinstance(factor, fx.Node):  # forward and backward cast it apart
                    factor = scalars.setdefault(_peel_casts(factor), factor)
                shown = {_shown(n) for n in (plain, factor) if isinstance(n, fx.Node)}
                reason = "" if shown.isdisjoint(written) else WRITTEN
                scales += _scale_sites(node, plain, factor, reason, context)
            elif node.target is MM and is_low_rank(node) and _is_one_of_two(node):
                dtype = _upcast_from(node, demoted)
                if dtype is not None:
                    demoted[node] = dtype
        yield from scales
        # Demoted products come last: the moves above know the products by their nodes.
        for node, dtype in demoted.items():
            rejected = "" if context.numerics == "relaxed" else FLOAT32
            yield Site(node, rejected, plan=_Demote(node, dtype))

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        plan = site.plan
        if isinstance(plan, _Drop):
            # Read the inputs as they are now: an earlier site may have replaced them.
            source = arg(site.node, 0)
            if tensor(source).dtype is not tensor(site.node).dtype:
                source = arg(source, 0)
            site.node.replace_all_uses_with(source)
            graph.erase_node(site.node)
        elif isinstance(plan, _Same):
            site.node.replace_all_uses_with(plan.first)
            graph.erase_node(site.node)
        elif isinstance(plan, _MoveScale):
            _move_scale(graph, plan)
        else:
            _demote(graph, plan)


def is_low_rank(mm: fx.Node) -> bool:
    """Whether one of the product's three sizes is a LoRA rank."""
    a, b = tensor(mm.args[0]), tensor(mm.args[1])
    return any(isinstance(s, int) and s <= MAX_RANK for s in (a.shape[0], a.shape[1], b.shape[1]))


def _is_one_of_two(mm: fx.Node) -> bool:
    """Whether the product reads another or is read by one, as an adapter's are forward and
    backward. Those of a router or a head do neither, and are in float32 on purpose."""
    return any(_peel_factors(arg(mm, i)).target is MM for i in range(2)) or _feeds_product(mm)


def _peel_factors(node: fx.Node) -> fx.Node:
    node = _peel_layout(node)
    while (scaled := as_scaled(node)) is not None:
        node = _peel_layout(scaled[0])
    return node


def _feeds_product(node: fx.Node) -> bool:
    for user in node.users:
        scaled = as_scaled(user)
        below = user.target in LAYOUT or (scaled is not None and scaled[0] is node)
        if user.target is MM or (below and _feeds_product(user)):
            return True
    return False


def _is_product(node: object) -> bool:
    """Whether a node is a matrix product, seen through views, the addition of a bias and a cast to
    float32."""
    while isinstance(node, fx.Node) and (
        node.target in VIEWS or node.target is ADD or widens(node)
    ):
        node = node.args[0]
    return isinstance(node, fx.Node) and (node.target is MM or capture.is_product(node))


def _is_returned(node: fx.Node) -> bool:
    """Whether the graph returns the node or a view of it: its memory must stay its own."""
    return any(u.op == "output" or (u.target in LAYOUT and _is_returned(u)) for u in node.users)


def _casts_nothing(cast: fx.Node) -> bool:
    """Whether a tensor is cast to the dtype it has, or a 16-bit one to float32 and back here
    (autocast does; scalar tensors leave the former)."""
    wide, dtype = arg(cast, 0), tensor(cast).dtype
    if tensor(wide).dtype is dtype:
        return True
    if wide.target is not CAST or tensor(wide).dtype is not torch.float32:
        return False
    return dtype in (torch.bfloat16, torch.float16) and tensor(wide.args[0]).dtype is dtype


def _alike(cast: fx.Node, casts: dict[object, fx.Node]) -> fx.Node:
    """Return the first cast of the same tensor for products; that of another checkpointed segment
    is not the same, since only its own is computed again with it."""
    if not _feeds_product(cast):
        return cast
    return casts.setdefault((*cast.args, cast.meta.get("ac_graph_id")), cast)


def _scale_sites(
    node: fx.Node, plain: fx.Node, factor: float | fx.Node, reason: str, context: Context
) -> Iterator[Site]:
    """Find where the factor of `node` = plain * factor may go: a product below, or those above;
    unless there is a reason against it."""
    found = []
    below = _peel_layout(plain)
    if below.target is MM and is_low_rank(below) and _single_use_chain(plain, below):
        found.append(_MoveScale(node, factor, below, is_output=True))
    else:
        products = _products_above(node)
        if products and all(is_low_rank(p) for p in products):
            found += [_MoveScale(node, factor, p, is_output=False) for p in dict.fromkeys(products)]
    for plan in found:
        strict = STRICT if context.numerics == "strict" else ""
        yield Site(plan.mm, reason or strict, plan=plan, by_choice=True)


def _shown(node: fx.Node) -> fx.Node:
    """Return the tensor that a node shows by views, copies of its layout and casts."""
    while node.target in LAYOUT or node.target is CAST or is_view(node):
        node = arg(node, 0)
    return node


def _peel_layout(node: fx.Node) -> fx.Node:
    while node.target in LAYOUT:
        node = arg(node, 0)
    return node


def _peel_casts(node: fx.Node) -> fx.Node:
    while node.target is CAST:
        node = arg(node, 0)
    return node


def _single_use_chain(top: fx.Node, bottom: fx.Node) -> bool:
    node = top
    while True:
        if len(node.users) != 1:
            return False
        if node is bottom:
            return True
        node = arg(node, 0)


def _products_above(node: fx.Node) -> list[fx.Node]:
    """List products that use `node` through views and permutes only; none if anything else does."""
    found: list[fx.Node] = []
    for user in node.users:
        if user.target in LAYOUT or (user.target is CAST and _casts_nothing(user)):
            above = _products_above(user)
            if not above:
                return []
            found += above
        elif user.target is MM:
            found.append(user)
        else:
            return []
    return found


def _upcast_from(mm: fx.Node, demoted: Mapping[fx.Node, torch.dtype]) -> torch.dtype | None:
    """Find the 16-bit dtype that an operand of a float32 product was cast from, or in which it
    will be computed if it is one of the `demoted` products."""
    if tensor(mm).dtype is not torch.float32:
        return None
    for operand in (arg(mm, 0), arg(mm, 1)):
        node = _peel_factors(operand)
        if node in demoted:
            return demoted[node]
        if node.target is CAST:
            dtype = tensor(node.args[0]).dtype
            if dtype in (torch.bfloat16, torch.float16):
                return dtype
    return None


def _move_scale(graph: fx.Graph, plan: _MoveScale) -> None:
    mm = plan.mm
    lhs, rhs = mm.args
    assert isinstance(lhs, fx.Node) and isinstance(rhs, fx.Node)
    if plan.is_output:
        plan.scaled.replace_all_uses_with(plan.plain)
        graph.erase_node(plan.scaled)
    else:
        # Views of the scaled tensor become views of the plain one, for one side of this product
        # alone: a product of the tensor with itself has the factor twice.
        old = mm.args
        lhs = _replay(graph, lhs, plan.scaled, plan.plain, mm)
        if lhs is old[0]:
            rhs = _replay(graph, rhs, plan.scaled, plan.plain, mm)
        if (lhs, rhs) == old:
            return  # by now, another factor stands between them
        mm.args = (lhs, rhs)
    if plan.factor == 1.0:
        return
    place = _place(lhs, rhs, plan)
    if place == "out":
        with graph.inserting_after(mm):
            new = graph.call_function(MUL, (mm, plan.factor))
        new.meta = dict(mm.meta)
        mm.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    else:
        operand = lhs if place == "lhs" else rhs
        with graph.inserting_before(mm):
            new = _scaled(graph, operand, plan.factor, mm)
        mm.args = (new, rhs) if place == "lhs" else (lhs, new)


def _place(lhs: fx.Node, rhs: fx.Node, plan: _MoveScale) -> str:
    """Choose where a factor costs least: on a parameter, else on the smallest of the three.

    A parameter is small, and scaled once for forward and backward: where forward has scaled it,
    backward reads that, and nothing stands between the products of its sum.
    """
    mm = plan.mm
    for side, node in (("lhs", lhs), ("rhs", rhs)):
        inner = below = _peel_layout(node)
        while below.target is CAST:
            below = _peel_layout(_peel_casts(below))
        if (
            below.op == "placeholder"
            and not is_tangent(below)
            and (
                _numel(below) <= max(_numel(mm), 1)
                or _times(inner, plan.factor) not in (None, plan.scaled)
            )
        ):
            return side
    sizes = {"out": _numel(mm), "lhs": _numel(lhs), "rhs": _numel(rhs)}
    return min(sizes, key=sizes.__getitem__)


def _scaled(graph: fx.Graph, node: fx.Node, factor: float | fx.Node, like: fx.Node) -> fx.Node:
    """Emit `node * factor` below layout changes, so that equal products are one node."""
    if node.target in LAYOUT:
        inner = _scaled(graph, arg(node, 0), factor, like)
        return replay(graph, node, inner, like)
    known = _times(node, factor)
    if known is not None:
        return known
    scaled = emit(graph, MUL, (node, factor), like)
    if node.op == "placeholder":
        # A parameter is kept anyway, so backward scales it again instead of keeping a second one.
        scaled.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return scaled


def _times(node: fx.Node, factor: float | fx.Node) -> fx.Node | None:
    """Find `node * factor` in the dtype of `node`; None where the graph does not have it."""
    for user in node.users:
        same = user.target is MUL and user.args == (node, factor)
        if same and tensor(user).dtype == tensor(node).dtype:
            return user
    return None


def _replay(graph: fx.Graph, node: fx.Node, old: fx.Node, new: fx.Node, before: fx.Node) -> fx.Node:
    if node is old:
        return new
    if node.target in LAYOUT:
        inner = _replay(graph, arg(node, 0), old, new, before)
        if inner is not node.args[0]:
            with graph.inserting_before(before):
                return replay(graph, node, inner, node)
    return node


def _demote(graph: fx.Graph, plan: _Demote) -> None:
    mm, dtype = plan.mm, plan.dtype
    with graph.inserting_before(mm):
        args = [_demoted(graph, arg(mm, i), dtype, mm) for i in range(2)]
        new = emit(graph, MM, args, mm)
        back = emit(graph, CAST, (new, torch.float32), mm)
    mm.replace_all_uses_with(back)
    graph.erase_node(mm)
    _cancel_casts(graph, back, new, dtype)


def _demoted(graph: fx.Graph, node: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
    """Return `node` in `dtype`: the tensor it was cast from where there is one, else a cast."""
    if node.target in LAYOUT:
        inner = _demoted(graph, arg(node, 0), dtype, like)
        return replay(graph, node, inner, like)
    if node.target is CAST and tensor(node.args[0]).dtype is dtype:
        return arg(node, 0)
    return emit(graph, CAST, (node, dtype), like)


def _cancel_casts(graph: fx.Graph, wide: fx.Node, narrow: fx.Node, dtype: torch.dtype) -> None:
    """Replace casts of `wide` (= `narrow` in float32) to `dtype`, also above views, by `narrow`."""
    for user in list(wide.users):
        if user.target is CAST and user.args[1] is dtype:
            user.replace_all_uses_with(narrow)
            graph.erase_node(user)
        elif user.target in LAYOUT:
            with graph.inserting_before(user):
                view = replay(graph, user, narrow, user)
            _cancel_casts(graph, user, view, dtype)


def _numel(node: fx.Node) -> int:
    total = 1
    for size in tensor(node).shape:
        total *= hint(size)
    return total
