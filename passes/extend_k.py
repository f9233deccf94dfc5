"""The adapter rides in the main product: `[x | x A'] @ [W | s B]'`, `[dY | dY s B] @ [W ; A]`.

A sum of products is one product over their concatenated inner dimensions. Applied to the sums of a
LoRA layer, forward (base and adapter) and backward (every projection of one input, and their
adapters), it removes a pass over [M, N] for each term and accumulates all of them in float32, which
is better numerics than adding rounded 16-bit results. It costs the adapter's columns, padded to a
multiple of 64 so that the product keeps its speed.

Where the layer's dtype has 16 bits and the sum is in float32 (the residual stream of a model under
autocast whose norms are float32), the product stands for terms that are each rounded to 16 bits and
cast, and is itself rounded once.

It pays only if both wide operands are written in place: `qfuse::extend` lets the producer of x and
the projection write into one buffer, and the weight is decoded into its columns (or rows) of
another. (In a checkpointed segment the projection stays a product of its own, which
`keep_checkpointed` can keep, and `project_in_place` puts it into the buffer that it is computed
for.) The pass refuses what does not allow that: an x that an opaque kernel (attention) makes,
unless little is copied, and an x that backward would compute again from what forward has written
over. It also refuses fewer rows than `extend_k.min_rows` of the preset, an adapter in another
dtype, and everything under numerics "strict".

bitsandbytes' LLM.int8 multiplies gradients in the dtype of its layer's input, also where autocast
had the forward product in 16 bits. With float32 norms the gradient of an input has terms in two
dtypes: float32 ones of the layers, and 16-bit ones of their adapters. A sum of several layers'
terms is reported for the first of them.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from inductor_q.context import Context
from inductor_q.passes.fold_lora import FLOAT32, STRICT
from inductor_q.passes.fuse_dropout import GRAD_X, PROJECT
from inductor_q.passes.graph import (
    ADD,
    CAST,
    CAT,
    CLONE,
    HALVES,
    LAYOUT,
    MM,
    MUL,
    PAD,
    PERMUTE,
    RESHAPE,
    SLICE,
    VIEWS,
    arg,
    as_matrix,
    backward_nodes,
    columns,
    computed_from,
    emit,
    is_tensor,
    peel_rows,
    peel_transposes,
    positions,
    same_shape,
    tensor,
    too_few_rows,
    widens,
    written_inputs,
)
from inductor_q.passes.products import (
    MAX_RANK,
    Product,
    as_product,
    as_scaled,
    is_rank,
    packed_weight,
    sums,
)
from inductor_q.passes.recompute import is_checkpointed, recompute_in_backward, recomputed_from
from inductor_q.passes.runner import Site

COLUMN_MULTIPLE = 64  # cuBLAS takes longer for a K that is no multiple of it
EXTEND = torch.ops.qfuse.extend.default
EXTEND_DROPPED = torch.ops.qfuse.extend_dropped.default
WIDE = (EXTEND, EXTEND_DROPPED)
FACTOR = (
    "a factor that cannot move (a dropout mask, a scaling without fold_lora, or of few rows) "
    "stands inside the adapter"
)
GRADIENT = (
    "backward multiplies in torch.float32, the dtype of the layer's input; forward and the adapter "
    "are in 16 bits. PEFT's prepare_model_for_kbit_training makes norms float32: with norms in 16 "
    "bits the adapter's gradient can join"
)
WRITTEN = (
    "the forward pass writes to what the input is computed from: "
    "backward would compute other values"
)


@dataclass(frozen=True)
class _Dropped(Product):
    """`qfuse::dropout_project` of x: the projections of several adapters, each under its mask."""

    @property
    def inner(self) -> int:
        return -1

    @property
    def cols(self) -> int:
        return int(tensor(self.node).shape[1])

    @property
    def weight(self) -> None:
        return None


@dataclass(frozen=True)
class _Low:
    """An adapter's second product: `projection[:, start:end] @ rhs`."""

    product: Product
    projection: Product
    start: int
    end: int
    scaled: bool  # a factor stands between the two products


@dataclass(frozen=True)
class _Sum:
    """`node` = base products + adapter products + rest; `shape` is what a view of a term wrote."""

    node: fx.Node
    bases: tuple[Product, ...]
    lows: tuple[_Low, ...]
    rest: tuple[fx.Node, ...]
    shape: object
    hidden: str  # why another term, an adapter's product as well, is not among `lows`

    @property
    def blocks(self) -> tuple[fx.Node, ...]:
        return tuple(base.x for base in self.bases)

    @property
    def transposed(self) -> bool:
        """Whether the weight is used as `W'`, as in forward."""
        return peel_transposes(self.bases[0].rhs)[1]


class ExtendK:
    name: ClassVar[str] = "extend_k"
    stage: ClassVar[str] = "joint"

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        groups: dict[tuple[tuple[fx.Node, ...], bool], list[_Sum]] = defaultdict(list)
        backward = backward_nodes(graph)
        for found in _sums(graph):
            weight = packed_weight(found.bases[0].weight)
            reason, unwanted = _impossible(found), _unwanted(found, context)
            if reason == GRADIENT and unwanted:
                reason = ""  # by choice: the forward sum of so few rows is not rewritten either
            if reason:
                yield Site(found.node, reason, weight, by_choice=reason == FACTOR)
            elif unwanted:
                yield Site(found.node, unwanted, weight, by_choice=True)
            else:
                # Forward has no tangents, so it shares no product with what depends on one.
                groups[found.blocks, found.node in backward].append(found)
        written = written_inputs(graph) if groups and backward else set()
        order = positions(graph) if groups else {}
        for members in groups.values():
            reason = _chained(members, order) or _group_rejected(members)
            if not written.isdisjoint(recomputed_from(members[0].blocks, backward)):
                reason = WRITTEN
            for i, member in enumerate(members):
                weight = packed_weight(member.bases[0].weight)
                plan = (members, backward) if i == 0 else None
                yield Site(member.node, reason, weight, plan, by_choice=True)

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        if site.plan is not None:
            _extend_group(graph, *site.plan)


# --- finding sums -------------------------------------------------------------------------------


def _sums(graph: fx.Graph) -> Iterator[_Sum]:
    """Find each maximal sum with a quantized and an adapter's product among its terms."""
    for node, leaves in sums(graph):
        bases: list[Product] = []
        lows: list[_Low] = []
        rest: list[fx.Node] = []
        shape: object = None
        for leaf in leaves:
            product, view = _term(leaf, of=node)
            low = _as_low(product) if product is not None and product.weight is None else None
            if product is not None and product.weight is not None:
                bases.append(product)
            elif low is not None:
                lows.append(low)
            else:
                rest.append(leaf)
                continue
            shape = view or shape
        hidden = next(filter(None, map(_hidden, rest)), "")
        beside = len(bases) > 1 and any(map(_from_dropout, rest))
        if bases and (lows or hidden or beside):
            yield _Sum(node, tuple(bases), tuple(lows), tuple(rest), shape, hidden)


def _term(leaf: fx.Node, of: fx.Node) -> tuple[Product | None, object]:
    """Find the product that a term of the sum `of` is a view of, or a view cast to float32, and the
    shape of the last view; no product where one of them has another user, or where the addition
    broadcasts the term."""
    shape: object = None
    if not is_tensor(leaf) or not same_shape(leaf, of):
        return None, None
    node: object = leaf
    while isinstance(node, fx.Node):
        if len(node.users) != 1:
            break
        if node.target is MM:
            return as_product(node), shape
        if node.target in VIEWS and peel_rows(node) is not node:
            shape = shape or node.args[1]
        elif not widens(node):
            break
        node = node.args[0]
    return None, None


def _as_low(product: Product) -> _Low | None:
    """Read a product as `projection @ rhs`, where the projection may be a slice of a stack."""
    if not is_rank(product.inner, product.cols):
        return None
    node = peel_rows(product.lhs)
    scaled = as_scaled(node)
    if scaled is not None:
        node = peel_rows(scaled[0])
    start, end = 0, product.inner
    span = columns(node)
    if span is not None:
        node, start, end = peel_rows(span[0]), span[1], span[2]
    if node.target is PROJECT:
        x, a = arg(node, 0), arg(node, 3)
        return _Low(product, _Dropped(node, x, a, peel_rows(x)), start, end, scaled is not None)
    projection = as_product(node)
    if projection is None or projection.weight is not None or projection.cols > MAX_RANK:
        return None
    return _Low(product, projection, start, end, scaled is not None)


def _from_dropout(leaf: fx.Node) -> bool:
    """Whether a term is the gradient that adapters under dropout give their input."""
    below = peel_rows(leaf)
    if below.target is CAST:
        below = peel_rows(arg(below, 0))
    return below.target is GRAD_X


def _hidden(leaf: fx.Node) -> str:
    """Return which cast or factor keeps a term from being an adapter's product; empty if none."""
    found: set[object] = set()
    node = leaf
    while node.target in VIEWS or node.target in (CAST, CLONE, MUL):
        widened = node.target is CAST and tensor(node.args[0]).dtype is torch.float32
        found.add(FLOAT32 if widened else node.target)
        node = arg(node, 0)
    product = as_product(node)
    if product is None or _as_low(product) is None:
        return ""
    if MUL in found and tensor(node).dtype is not torch.float32:
        return FACTOR  # a mask of dropout is float32 under autocast, and the product is not
    return FLOAT32 if FLOAT32 in found else FACTOR if MUL in found else ""


# --- refusing -----------------------------------------------------------------------------------


def _impossible(found: _Sum) -> str:
    if found.hidden and not found.lows:
        return found.hidden
    dtypes = {tensor(low.projection.node).dtype for low in found.lows}
    layer = {tensor(base.node).dtype for base in found.bases}
    whole = tensor(found.node).dtype
    if not dtypes <= layer or (layer != {whole} and not _are_widened(layer, whole)):
        return GRADIENT if _has_wide_gradients(found, dtypes) else _in_two_dtypes(dtypes, layer)
    if len({peel_transposes(base.rhs)[1] for base in found.bases}) > 1:
        return "one term uses its weight transposed, another does not"
    for one, other in itertools.combinations(found.lows, 2):
        overlap = one.start < other.end and other.start < one.end
        if one.projection.node is other.projection.node and overlap:
            return "one projection feeds two adapters of the same layer"
    if len(set(found.blocks)) < len(found.blocks):
        return "two quantized layers of the sum share an input"
    return ""


def _in_two_dtypes(adapters: set[torch.dtype], layer: set[torch.dtype]) -> str:
    both = [" and ".join(sorted(map(str, dtypes))) for dtypes in (adapters, layer)]
    found = f"the adapter computes in {both[0]}, the layer in {both[1]}"
    if adapters == {torch.float32} and layer <= HALVES:
        return f"{found} (autocast or 16-bit adapters let them join the main product)"
    if layer == {torch.float32} and adapters <= HALVES:
        return f"{found} (a layer whose compute dtype has 16 bits takes them in)"
    return found


def _has_wide_gradients(found: _Sum, adapters: set[torch.dtype]) -> bool:
    """Whether layers multiply their gradients in float32, and computed in 16 bits in forward."""
    return (
        not found.transposed
        and adapters <= HALVES
        and all(tensor(base.node).dtype is torch.float32 for base in found.bases)
        and all(_is_decoded_to_16_bits(base) for base in found.bases)
    )


def _is_decoded_to_16_bits(base: Product) -> bool:
    assert base.weight is not None, f"{base=}"
    operands = base.weight.args[0]
    return any(
        node.args[0] == operands and tensor(node).dtype in HALVES
        for node in base.weight.graph.find_nodes(op="call_function", target=base.weight.target)
    )


def _are_widened(layer: set[torch.dtype], whole: torch.dtype) -> bool:
    """Whether terms in the one 16-bit dtype of a layer are added in float32."""
    return len(layer) == 1 and layer <= HALVES and whole is torch.float32


def _unwanted(found: _Sum, context: Context) -> str:
    if context.numerics == "strict":
        return STRICT
    if reason := too_few_rows(found.node, "extend_k.min_rows", context):
        return reason
    return FACTOR if any(low.scaled for low in found.lows) else ""


def _chained(members: Sequence[_Sum], order: Mapping[fx.Node, int]) -> str:
    projections = [low.projection for m in members for low in m.lows]
    inputs = [*members[0].blocks, *(n for p in projections for n in (p.lhs, p.rhs))]
    results = [*(m.node for m in members), *(p.node for p in projections)]
    if computed_from(inputs, results, order):
        return "an input of the wide product is computed from its result"
    return ""


def _group_rejected(members: Sequence[_Sum]) -> str:
    """Refuse a group where copying what opaque kernels wrote costs more than the passes over
    [M, N] that it saves."""
    blocks = members[0].blocks
    dropped = {low.projection.node for m in members for low in m.lows if _is_dropped(low)}
    others = {low.projection.node for m in members for low in m.lows} - dropped
    if dropped and (others or len(dropped) > 1 or len(blocks) > 1):
        return "adapters of one input drop its elements in different ways"
    if any(
        low.projection.x is not blocks[0] for m in members for low in m.lows if _is_dropped(low)
    ):
        return "an adapter under dropout reads another input than its layer"
    copied = sum(tensor(x).shape[-1] for x in blocks if not _writes_anywhere(x))
    saved = sum(
        base.cols * (len(m.bases) + len(m.lows) - 1) for m in members for base in m.bases[:1]
    )
    if 2 * copied > saved:
        opaque = ", ".join(sorted({_kernel(x) for x in blocks if not _writes_anywhere(x)}))
        return f"the input comes from {opaque}, which cannot write into a wider buffer"
    return ""


def _is_dropped(low: _Low) -> bool:
    return isinstance(low.projection, _Dropped)


def _producer(node: fx.Node) -> fx.Node:
    """Find the node that computes a tensor, below layout changes."""
    while node.target in LAYOUT:
        node = arg(node, 0)
    return node


def _kernel(node: fx.Node) -> str:
    """Name the operation that computes a tensor."""
    node = _producer(node)
    while node.target is operator.getitem:
        node = arg(node, 0)
    called = node.args[0] if isinstance(node.target, torch._ops.HigherOrderOperator) else None
    return str(called if isinstance(called, torch._ops.OpOverload) else node.target)


def _writes_anywhere(node: fx.Node) -> bool:
    """Whether Inductor can make the producer write into a slice of a wider buffer."""
    producer = _producer(node)
    return (
        producer.op == "call_function"
        and producer.target is not operator.getitem
        and getattr(producer.target, "namespace", "") in ("aten", "prims")
    )


# --- rewriting ----------------------------------------------------------------------------------


def _extend_group(graph: fx.Graph, members: Sequence[_Sum], backward: set[fx.Node]) -> None:
    """Emit one wide left operand for sums over the same inputs, and one wide weight per sum."""
    offsets: dict[fx.Node, int] = {}  # projection -> its first column among the adapters' columns
    projections: list[Product] = []
    width = 0
    for member in members:
        for low in member.lows:
            if low.projection.node not in offsets:
                offsets[low.projection.node] = width
                projections.append(low.projection)
                width += low.projection.cols
    padded = -(-width // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    first = members[0].node
    blocks = list(members[0].blocks)
    nodes = [projection.node for projection in projections]
    apart = len(nodes) == 1 and nodes[0] not in backward and is_checkpointed(nodes[0])
    with graph.inserting_before(first):
        if apart:
            wide = _emit_beside(graph, members[0].bases, projections[0], padded - width, first)
        else:
            wide = _emit_extend(graph, blocks, members[0].bases, projections, padded - width, first)
        for member in members:
            _emit_sum(graph, member, wide, offsets, padded)
        base_width = sum(tensor(x).shape[-1] for x in blocks)
        for projection in () if apart else projections:
            start = base_width + offsets[projection.node]
            part = emit(graph, SLICE, (wide, 1, start, start + projection.cols), projection.node)
            if projection.node not in backward:
                # Backward reads a copy of its r columns: a slice would keep the whole buffer alive
                # until then.
                part = emit(graph, CLONE, (part,), projection.node)
            projection.node.replace_all_uses_with(part)
        _read_blocks_from(graph, wide, members[0], backward)


def _emit_extend(
    graph: fx.Graph,
    blocks: list[fx.Node],
    bases: Sequence[Product],
    projections: Sequence[Product],
    padding: int,
    like: fx.Node,
) -> fx.Node:
    """Emit `qfuse::extend` and view it as a matrix. It takes the unflattened inputs where they
    agree, so that their producers, which know no flattening, can write in place."""
    if projections and isinstance(projections[0], _Dropped):
        _, *shared = projections[0].node.args
        wide = emit(graph, EXTEND_DROPPED, (blocks[0], *shared, padding), like)
        return as_matrix(graph, wide)
    lefts = [p.x for p in projections]
    leading = tensor(blocks[0]).shape[:-1]
    if any(tensor(n).shape[:-1] != leading for n in (*blocks, *lefts)):
        blocks = [base.lhs for base in bases]
        lefts = [p.lhs for p in projections]
    rights = [p.rhs for p in projections]
    return as_matrix(graph, emit(graph, EXTEND, (blocks, lefts, rights, padding), like))


def _emit_beside(
    graph: fx.Graph, bases: Sequence[Product], projection: Product, padding: int, like: fx.Node
) -> fx.Node:
    """Emit `qfuse::extend` of inputs and a projection of them that is computed by itself."""
    blocks = [base.x for base in bases]
    if any(tensor(x).shape[:-1] != tensor(blocks[0]).shape[:-1] for x in blocks):
        blocks = [base.lhs for base in bases]
    part = projection.node
    if padding:
        part = emit(graph, PAD, (part, [0, padding]), part)
    return as_matrix(graph, emit(graph, EXTEND, ([*blocks, part], [], [], 0), like))


def _emit_sum(
    graph: fx.Graph, member: _Sum, wide: fx.Node, offsets: dict[fx.Node, int], width: int
) -> None:
    like = member.node
    # Decode here, next to the use: where the layer stood, several wide weights would live at once.
    weights = [graph.node_copy(base.weight) for base in member.bases if base.weight is not None]
    tail = _emit_tail(graph, member, offsets, width)
    if member.transposed:
        stacked = emit(graph, CAT, ([*weights, *tail], 1), like)
        rhs = emit(graph, PERMUTE, (stacked, [1, 0]), like)
    else:
        rhs = emit(graph, CAT, ([*weights, *tail], 0), like)
    result = emit(graph, MM, (wide, rhs), member.bases[0].node)
    if tensor(like).dim() != 2:
        result = emit(graph, RESHAPE, (result, member.shape), like)
    if tensor(result).dtype != tensor(like).dtype:
        result = emit(graph, CAST, (result, tensor(like).dtype), like)
    for term in member.rest:
        result = emit(graph, ADD, (result, term), like)
    like.replace_all_uses_with(result)


def _emit_tail(
    graph: fx.Graph, member: _Sum, offsets: dict[fx.Node, int], width: int
) -> list[fx.Node]:
    """Emit the adapters' rows or columns beside the weight, with zeros in between."""
    spans = sorted(
        ((offsets[low.projection.node] + low.start, low) for low in member.lows),
        key=lambda span: span[0],
    )
    pieces = []
    for i, (start, low) in enumerate(spans):
        before = start if i == 0 else 0
        end = start + low.end - low.start
        after = (spans[i + 1][0] if i + 1 < len(spans) else width) - end
        below, seen_transposed = peel_transposes(low.product.rhs)
        if seen_transposed != member.transposed:
            below = emit(graph, PERMUTE, (below, [1, 0]), low.product.node)
        padding = [before, after] if member.transposed else [0, 0, before, after]
        pieces.append(
            emit(graph, PAD, (below, padding), low.product.node) if any(padding) else below
        )
    return pieces


def _read_blocks_from(graph: fx.Graph, wide: fx.Node, member: _Sum, backward: set[fx.Node]) -> None:
    """Let later readers of a block find it in the wide buffer.

    In backward, other products of a block (dB = dY' @ xA) read a slice. In forward they do not: a
    slice would have to be saved whole where x itself may be recomputed. Views of a block come after
    the wide buffer, since a view fixes the layout of what it looks at; but the view that a
    projection beside the buffer reads stays in front, and goes with it (`project_in_place`).
    """
    start = 0
    for base in member.bases:
        end = start + tensor(base.x).shape[-1]
        views = [u for u in base.x.users if u.target in VIEWS and peel_rows(u) is base.x]
        if base.x not in backward:
            recompute_in_backward(base.x)
        else:
            part = emit(graph, SLICE, (wide, 1, start, end), base.node)
            for view in (base.x, *views):
                for user in list(view.users):
                    if user.target is PERMUTE and tensor(view).dim() == 2:
                        user.replace_input_with(view, part)
        for view in views:
            wide.append(view)
        start = end
