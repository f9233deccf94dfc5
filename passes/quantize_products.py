"""Compute products with frozen weights in eight bits, forward and for the gradient of the input.

`x @ W'` becomes a product of x, cast with a scale for each token, and of W, decoded straight to
eight bits with a scale for each out-feature. In `dY @ W` these scales are multiplied into dY before
its cast, and W is decoded transposed. In FP8 gradients that are summed are one product
(`sum_products`). A weight that is stored in eight bits with a scale for each row needs no decode:
it is multiplied as it is, and copied transposed. All of it but the decode consists of torch's
operators, so the casts join the kernels that produce x and dY; products of one input share its
cast.

An adapter's products, dropout and the gradients of adapters keep their inputs in 16 bits. So the
adapter cannot ride in a product (`extend_k`): it is a product of its own that is added, which is
exact. In FP8 it is added in place (`add_adapters`); in int8, where a product has its scales in the
kernel that reads it, that kernel adds. The adapter's gradient reads x: backward
computes a pointwise x again, as extend_k has it do. Because the adapter has x written in 16 bits
anyway, the cast reads what is written: Inductor would otherwise compute x three times, for the
largest number of each row, for the cast, and for the adapter.

A frozen weight that is not quantized is cast in the graph (`frozen_weights`).

It is done where `qfuse.compute` asks for "fp8" or "int8". The pass refuses numerics "strict",
dtypes and sizes that tensor cores do not multiply so, devices without e4m3, fewer rows than
`quantize_products.min_rows` of the preset, the layers of `qfuse.compute.exclude`, and weights that
the forward pass writes to, since backward decodes or casts them again. Of stacks of weights it
takes packed experts with many rows each (`experts_in_fp8`), and refuses batched products and parts
of a stack (`stack_products`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from inductor_q import comparison
from inductor_q.context import Context
from inductor_q.exclusions import excluded_by
from inductor_q.kernels import rounding
from inductor_q.kernels.expert_calls import IN_FP8
from inductor_q.ops import eight_bits
from inductor_q.passes import experts_in_fp8
from inductor_q.passes.add_adapters import ADD_PRODUCT, add_adapter
from inductor_q.passes.emit_eight_bits import (
    emit_cast,
    emit_product,
    emit_weight,
    emit_weights,
    is_decoded,
    weight_key,
)
from inductor_q.passes.fold_lora import STRICT
from inductor_q.passes.frozen_weights import frozen_products
from inductor_q.passes.graph import (
    ADD,
    ADDMM,
    MM,
    arg,
    backward_nodes,
    emit,
    is_view,
    peel_transposes,
    replace,
    rows,
    tensor,
    too_few_rows,
    written_inputs,
)
from inductor_q.passes.products import MATERIALIZE, Product, as_product, packed_weight
from inductor_q.passes.recompute import is_pointwise, recompute_in_backward, recomputed_from
from inductor_q.passes.runner import Site
from inductor_q.passes.stack_products import stack_products
from inductor_q.passes.sum_products import MOST, adapters_of, drop_summand, stack_inner, sum_of

MULTIPLE = 16  # of both sizes of a weight, for `torch._scaled_mm` and `torch._int_mm`
FEW_ROWS = 16  # `torch._int_mm` raises for so many and fewer on a GPU
COMPARE = torch.ops.qfuse.compare.default

WRITTEN = "the forward pass writes to the weight: backward would multiply by other numbers"


@dataclass(frozen=True)
class _Shared:
    """Products that share a cast of their input."""

    products: list[Product]
    recomputed: fx.Node | None
    """The input, where backward may compute it again for the adapter's gradient."""
    written: bool
    """Whether something else needs the input in memory too, in 16 bits."""
    others: frozenset[fx.Node]
    """All products with frozen weights, of which none is an adapter's."""
    summed: Mapping[Hashable, Sequence[Product]]
    """The summands of one product in backward, by the key of a weight that one of them has."""


@dataclass(frozen=True)
class _Summed:
    """Products that become one, which has one cast of their inputs side by side."""

    products: list[Product]
    written: list[bool]
    """Whether something else needs the input in memory too, for each."""
    others: frozenset[fx.Node]


class QuantizeProducts:
    name: ClassVar[str] = "quantize_products"
    stage: ClassVar[str] = "joint"

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        if context.resolved.compute == "bf16":
            return
        exact = STRICT if context.numerics == "strict" else ""
        backward = backward_nodes(graph)
        written = written_inputs(graph) if backward else set()
        for found in stack_products(graph, context):
            stack = found.stack
            reason = exact or _excluded(stack, context)
            reason = reason or found.reason or experts_in_fp8.refused(found.node, context)
            if not reason and not written.isdisjoint(_inputs(*experts_in_fp8.operands(found.node))):
                reason = WRITTEN
            if reason:
                yield Site(found.node, reason, stack, by_choice=True, plain=found.plain)
                continue
            provider = experts_in_fp8.provider(found.node)
            yield Site(found.node, "", stack, provider=provider, op=IN_FP8)
        shared: dict[tuple[Any, ...], list[Product]] = defaultdict(list)
        summed: dict[tuple[Any, ...], list[Product]] = defaultdict(list)
        products = [*_packed_products(graph), *frozen_products(graph, context)]
        others = frozenset(product.node for product in products)
        for product in products:
            node, weight = product.node, _stored(product)
            plain = product.weight is None
            reason = _refused(product, context) or _excluded(weight, context)
            if not reason and not written.isdisjoint(_inputs(product.rhs)):
                reason = WRITTEN
            if reason:
                yield Site(node, reason, weight, by_choice=True, plain=plain)
                continue
            # A segment that is computed again is cast on its own, and so is a gradient, whose
            # product has scales of its own, unless it is summed with others.
            segment, forward = node.meta.get("ac_graph_id"), peel_transposes(product.rhs)[1]
            total = _sum_of(node, context) if not forward and node in backward else None
            if total is not None:
                summed[total, tensor(node).dtype].append(product)
            else:
                own = None if forward else node
                shared[product.x, segment, node in backward, own].append(product)
        joined: dict[Hashable, Sequence[Product]] = {}
        for summands in summed.values():
            for members in (summands[i : i + MOST] for i in range(0, len(summands), MOST)):
                if len(members) == 1:
                    shared[members[0].x, members[0].node] = members
                    continue
                joined.update((weight_key(member), members) for member in members)
                reads = [_is_written([member], backward) for member in members]
                yield from _sites(members, _Summed(members, reads, others), context)
        for (x, *_), members in shared.items():
            again = bool(backward) and x not in backward
            again = again and written.isdisjoint(recomputed_from([x], backward))
            reads_it = _is_written(members, backward)
            plan = _Shared(members, x if again else None, reads_it, others, joined)
            yield from _sites(members, plan, context)

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        plan, dtype = site.plan, rounding.DTYPES[context.resolved.compute]
        if isinstance(plan, _Summed):
            _emit_sum(graph, plan, dtype)
        elif site.op == IN_FP8:
            experts_in_fp8.emit(graph, site.node)
        elif isinstance(plan, _Shared):
            _emit_shared(graph, plan, dtype, context)


def _sites(members: Sequence[Product], plan: _Shared | _Summed, context: Context) -> Iterator[Site]:
    dtype = rounding.DTYPES[context.resolved.compute]
    for i, member in enumerate(members):
        op = "requantize" if is_decoded(member, dtype) else ""
        stored, plain = _stored(member), member.weight is None
        yield Site(member.node, weight=stored, plan=None if i else plan, plain=plain, op=op)


def _sum_of(node: fx.Node, context: Context) -> fx.Node | None:
    """Return the sum of which a product may be a summand in one with others.

    int8 has steps of one size, so that a gradient smaller than the others, whose scale it would
    share, would be cast to few of them. A comparison of layers needs the product of each.
    """
    can = context.resolved.compute == "fp8" and node.target is MM and not comparison.active()
    return sum_of(node) if can else None


def _packed_products(graph: fx.Graph) -> Iterator[Product]:
    for node in graph.find_nodes(op="call_function", target=MM):
        product = as_product(node)
        if product is not None and product.weight is not None:
            yield product


def _is_written(products: Sequence[Product], backward: set[fx.Node]) -> bool:
    """Whether the input that products share is element-wise, and something else reads it that is
    not: as a rule another product or a kernel's call, which need it in memory. Of forward and
    backward, only the one that the products are in is asked."""
    below, nodes = products[0].lhs, {product.node for product in products}
    while is_view(below) and not is_pointwise(below):
        below = arg(below, 0)
    is_late = products[0].node in backward
    others = {reader for reader in _readers(below) - nodes if (reader in backward) is is_late}
    return is_pointwise(below) and not all(is_pointwise(reader) for reader in others)


def _readers(x: fx.Node) -> set[fx.Node]:
    """Find what reads a tensor, itself or through views."""
    found: set[fx.Node] = set()
    for user in x.users:
        found |= _readers(user) if is_view(user) else {user}
    return found


def _stored(product: Product) -> fx.Node | None:
    """Return the input that holds a product's weight: its codes, or itself in 16 bits."""
    below = peel_transposes(product.rhs)[0]
    return below if product.weight is None else packed_weight(below)


def _inputs(*weights: fx.Node) -> set[fx.Node]:
    """Find the inputs that weights are computed from: backward decodes or casts them again."""
    todo, seen = [*weights], {*weights}
    while todo:
        new = set(todo.pop().all_input_nodes) - seen
        seen |= new
        todo += new
    return {node for node in seen if node.op == "placeholder"}


def _emit_shared(graph: fx.Graph, plan: _Shared, dtype: torch.dtype, context: Context) -> None:
    """Emit products in eight bits that share a cast, each in the place of its own or, where layers
    are compared, beside it."""
    cast: list[fx.Node] | None = None
    for product in plan.products:
        layer = context.module_path(_stored(product)) if comparison.active() else None
        like = product.node
        with graph.inserting_before(like):
            by_rows = peel_transposes(product.rhs)[1]  # the inner dimension is that of W's rows
            beside = plan.summed.get(weight_key(product), (product,))
            scale, codes = emit_weight(graph, product, beside, dtype, transposed=not by_rows)
            if cast is None:
                x = product.lhs
                if plan.written:
                    x = emit(graph, MATERIALIZE, (x,), like)
                cast = emit_cast(graph, [x], None if by_rows else scale, like, dtype)
            new = emit_product(graph, cast, codes, scale if by_rows else None, like)
            if like.target is ADDMM:
                new = emit(graph, ADD, (new, arg(like, 0)), like)
        if layer is None:
            replace(like, new)
            graph.erase_node(like)
        else:
            with graph.inserting_after(new):
                exact = emit(graph, COMPARE, (like, new, layer, by_rows), like)
            replace(like, exact)
            exact.update_arg(0, like)
        if dtype is torch.float8_e4m3fn and layer is None and like.target is MM:
            add_adapter(graph, new, plan.others)
    if plan.recomputed is not None:
        recompute_in_backward(plan.recomputed)


def _emit_sum(graph: fx.Graph, plan: _Summed, dtype: torch.dtype) -> None:
    """Emit one product in FP8 for summands of one sum, and one for their adapters, which is added
    in place (`add_adapters`). It stands where the last of them did: before that its weights, a byte
    for each number, would be in memory while gradients are still computed from larger tensors."""
    like = max(product.node for product in plan.products)
    rest = [product for product in plan.products if product.node is not like]
    adapters = adapters_of(plan.products, plan.others)
    with graph.inserting_before(like):
        scale, codes = emit_weights(graph, plan.products, dtype)
        inputs = [
            emit(graph, MATERIALIZE, (product.lhs,), like) if written else product.lhs
            for product, written in zip(plan.products, plan.written, strict=True)
        ]
        cast = emit_cast(graph, inputs, scale, like, dtype)
        new = emit_product(graph, cast, codes, None, like)
        if adapters:
            new = emit(graph, ADD_PRODUCT, (new, *stack_inner(graph, adapters, like)), like)
    for product in (*rest, *adapters):
        drop_summand(graph, product.node)
    replace(like, new)
    graph.erase_node(like)


def _refused(product: Product, context: Context) -> str:
    """Return why a product stays in 16 bits; empty where it can be computed in eight."""
    if context.numerics == "strict":
        return STRICT
    compute, value = context.resolved.compute, tensor(product.node)
    if reason := eight_bits.unable(compute, value.device):
        return reason
    allowed = (torch.bfloat16,) if compute == "fp8" else (torch.bfloat16, torch.float16)
    if value.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        return f"the product is in {value.dtype}; qfuse.compute={compute!r} is for {names}"
    if product.inner % MULTIPLE or product.cols % MULTIPLE:
        return f"the weight's sizes are no multiples of {MULTIPLE}, as eight-bit products need"
    least, count = context.threshold("quantize_products.min_elements"), product.inner * product.cols
    if count < least:
        return (
            f"a weight of {count} elements, fewer than quantize_products.min_elements={least} of "
            "the preset"
        )
    if reason := too_few_rows(product.node, "quantize_products.min_rows", context):
        return reason
    if compute == "int8" and value.device.type == "cuda" and not _has_more_rows(value, FEW_ROWS):
        return f"{rows(product.node)} rows; products in int8 have more than {FEW_ROWS} on a GPU"
    return ""


def _excluded(weight: fx.Node | None, context: Context) -> str:
    """Return which pattern of the user's excludes a layer, or one that runs by the same graph."""
    path = context.module_path(weight)
    for name in (path, *context.counterparts.get(path, ())):
        if pattern := excluded_by(name, context.resolved.exclude):
            of = "" if name == path else f", for {name}, which runs by the same graph"
            return f"qfuse.compute.exclude has {pattern!r}{of}"
    return ""


def _has_more_rows(value: Tensor, few: int) -> bool:
    """Whether a matrix has more than so many rows; dynamic shapes get a guard that says the same,
    so that a batch of fewer rows is compiled anew."""
    return bool(value.shape[0] > few)
