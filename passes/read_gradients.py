"""Multiply a layer's gradient with B and with the projection in one read of it.

An adapter adds `s * (x A') B'` to the output of its layer. Backward multiplies dY, the gradient of
that output, twice: `dY B` is the gradient of the projection p = x A', `dY' p` that of B. Both are a
few columns wide, so that they cost what reading dY does. `qfuse::adapter_grads` computes both while
it reads dY once, and multiplies by the scaling of the adapter, which is a launch of its own
otherwise.

The pass runs after the partitioner, when no other pass looks for these products any more. Where
extend_k has put `dY B` beside dY (without dropout), `qfuse::extend_grads` takes the place of
`qfuse::extend`. The pass does not find the products of several adapters of one layer, nor those of
layers whose outputs are added, as their B and their projections are stacked. It refuses more ranks
than the kernel takes: cuBLAS would compute the op by the products that it stands for.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import fx

from inductor_q.context import Context
from inductor_q.kernels.adapter_grads_triton import MOST
from inductor_q.kernels.gpu import too_many_ranks
from inductor_q.passes.extend_k import EXTEND
from inductor_q.passes.fold_lora import STRICT
from inductor_q.passes.graph import (
    CAST,
    HALVES,
    LAYOUT,
    MM,
    arg,
    backward_nodes,
    columns,
    emit,
    last_size,
    peel_rows,
    peel_transposes,
    replace,
    single_user,
    tensor,
)
from inductor_q.passes.products import as_scaled, is_rank
from inductor_q.passes.runner import PARTITIONED, Site

PROVIDER = "qfuse.adapter_grads"
ADAPTER_GRADS = torch.ops.qfuse.adapter_grads.default
EXTEND_GRADS = torch.ops.qfuse.extend_grads.default
ALONE = "no product of the same gradient with the projection is in the graph"


@dataclass(frozen=True)
class _Read:
    """A product that reads a gradient: `node` is `factor * (grad @ other)`, where `other` is B, or
    `factor * (grad' @ other)`, where it is the projection; or it is `qfuse::extend`, which has the
    first kind within it."""

    node: fx.Node
    grad: fx.Node  # [M, N]
    other: fx.Node  # [N, r] or [M, r]
    factor: float


class ReadGradients:
    name: ClassVar[str] = "read_gradients"
    stage: ClassVar[str] = PARTITIONED

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        of_p: defaultdict[Any, list[_Read]] = defaultdict(list)
        of_b: defaultdict[Any, list[_Read]] = defaultdict(list)
        strict = STRICT if context.numerics == "strict" else ""
        backward = backward_nodes(graph)
        for node in graph.find_nodes(op="call_function", target=MM):
            for read, found in ((_of_projection, of_p), (_of_parameter, of_b)):
                product = read(node)
                if product and _reads_gradient(product, backward):
                    found[_key(product)].append(product)
        extended = [_within(wide) for wide in graph.find_nodes(op="call_function", target=EXTEND)]
        for ones in (*extended, *([one] for found in of_p.values() for one in found)):
            given = all(_reads_gradient(one, backward) and _is_input(one.other) for one in ones)
            if not ones or not given:
                continue
            twos = _partners(ones, of_b)
            if not twos and too_many_ranks(_rank(ones), MOST):
                continue  # such as the head of a small model
            reason = strict or _refused(ones, twos)
            if not reason:
                for two in twos:
                    of_b[_key(two)].remove(two)
            yield Site(ones[0].node, reason, plan=(ones, twos), by_choice=True, provider=PROVIDER)

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        ones, twos = site.plan
        if site.node.target is EXTEND:
            _extend(graph, site.node, ones, twos)
            return
        (one,), (two,) = ones, twos
        with graph.inserting_before(one.node):
            args = (one.grad, two.other, one.other, one.factor, two.factor)
            both = emit(graph, ADAPTER_GRADS, args, one.node)
            results = [emit(graph, operator.getitem, (both, i), one.node) for i in range(2)]
        for product, result in zip((one, two), results, strict=True):
            replace(product.node, result)
            graph.erase_node(product.node)


def _extend(graph: fx.Graph, wide: fx.Node, ones: Sequence[_Read], twos: Sequence[_Read]) -> None:
    """Let `qfuse::extend_grads` compute what `qfuse::extend` and the products `twos` do."""
    blocks, grads, _, padding = wide.args
    bs, ps = [one.other for one in ones], [two.other for two in twos]
    factors = [[product.factor for product in products] for products in (ones, twos)]
    with graph.inserting_before(wide):
        every = emit(graph, EXTEND_GRADS, (blocks, grads, bs, ps, *factors, padding), wide)
        results = [emit(graph, operator.getitem, (every, i), wide) for i in range(1 + len(ones))]
    for node, result in zip((wide, *(two.node for two in twos)), results, strict=True):
        replace(node, result)
        graph.erase_node(node)


def _within(wide: fx.Node) -> list[_Read]:
    """Read the products within `qfuse::extend`; none, where one is not of a gradient with B."""
    lefts, rights = cast("list[list[fx.Node]]", wide.args[1:3])
    if not all(_fits(grad, *tensor(b).shape) for grad, b in zip(lefts, rights, strict=True)):
        return []
    scaled = [_times(grad, b) for grad, b in zip(lefts, rights, strict=True)]
    return [_Read(wide, grad, b, factor) for grad, b, factor in scaled]


def _reads_gradient(product: _Read, backward: set[fx.Node]) -> bool:
    """Whether one operand is a gradient and the other is forward's, so that nothing waits for
    itself."""
    return product.grad in backward and product.other not in backward


def _partners(ones: Sequence[_Read], of_b: Mapping[Any, Sequence[_Read]]) -> list[_Read]:
    """Find another product of the same gradient for each, as far as there are any: which one is
    the same, since each result goes where its own product stood."""
    seen: Counter[Any] = Counter()
    found: list[_Read] = []
    for key in map(_key, ones):
        found += of_b[key][seen[key] : seen[key] + 1]
        seen[key] += 1
    return found


def _is_input(node: fx.Node) -> bool:
    """Whether a matrix is an input of the graph, or a cast or view of one."""
    while node.target in LAYOUT or node.target is CAST:
        node = arg(node, 0)
    return node.op == "placeholder"


def _refused(ones: Sequence[_Read], twos: Sequence[_Read]) -> str:
    if len(twos) < len(ones):
        return ALONE
    return too_many_ranks(_rank(ones), MOST)


def _rank(ones: Sequence[_Read]) -> int:
    return max(int(tensor(one.other).shape[1]) for one in ones)


def _key(product: _Read) -> tuple[fx.Node, int]:
    return _block(product.grad), tensor(product.other).shape[1]


def _block(grad: fx.Node) -> fx.Node:
    """Return the gradient below views, also where it is read from the wide buffer of extend_k."""
    grad = peel_rows(grad)
    span = columns(grad)
    wide = peel_rows(span[0]) if span else None
    if span is None or wide is None or wide.target is not EXTEND:
        return grad
    start, blocks = 0, cast(Sequence[fx.Node], wide.args[0])
    for block in blocks:
        end = start + last_size(block)
        if span[1:] == (start, end):
            return peel_rows(block)
        start = end
    return grad


def _of_projection(node: fx.Node) -> _Read | None:
    """Read a product `dY @ B` of many columns with a parameter of few."""
    grad, b = arg(node, 0), arg(node, 1)
    if not _fits(grad, *tensor(b).shape) or peel_transposes(grad)[1]:
        return None
    return _scaled(node, grad, b)


def _of_parameter(node: fx.Node) -> _Read | None:
    """Read a product `dY' @ p` of many rows of both."""
    (grad, transposed), p = peel_transposes(arg(node, 0)), arg(node, 1)
    if not transposed or not _fits(grad, *(tensor(t).shape[1] for t in (grad, p))):
        return None
    return _scaled(node, grad, p)


def _fits(grad: fx.Node, size: object, rank: object) -> bool:
    sizes = isinstance(size, int) and isinstance(rank, int) and is_rank(rank, size)
    return sizes and tensor(grad).dtype in HALVES


def _scaled(node: fx.Node, grad: fx.Node, other: fx.Node) -> _Read:
    """Read a product together with the numbers that its other operand and its result, where only
    that is read, are multiplied by."""
    grad, other, factor = _times(grad, other)
    above = single_user(node)
    outer = as_scaled(above) if above is not None else None
    if outer is not None and above is not None and outer[0] is node and isinstance(outer[1], float):
        node, factor = above, factor * outer[1]
    return _Read(node, grad, other, factor)


def _times(grad: fx.Node, other: fx.Node) -> tuple[fx.Node, fx.Node, float]:
    """Take the number that the second operand of a product is multiplied by from it."""
    scaled = as_scaled(other)
    if scaled is not None and isinstance(scaled[1], float):
        return grad, scaled[0], scaled[1]
    return grad, other, 1.0
