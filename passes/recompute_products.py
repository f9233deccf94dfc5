"""Compute wide products of a checkpointed segment again, where torch would keep them.

torch 2.11 marks what a checkpointed segment computes for recomputation, but not what an
`autograd.Function` in it computes, and bitsandbytes' products are in one: backward keeps them,
under stock Inductor as well. Together they are several times the segment's input. (torch 2.13 marks
them, and all are computed again.)

Products cost the same time for a byte of their results where their inputs are equally wide. So the
narrow ones stay, up to `recompute_products.max_kept` times the largest tensor that the segment
reads, and the rest is computed again, with what else in the segment has no mark. That tensor is the
segment's input or, where tokens are fewer than a weight has rows or so, a decoded weight: beside
the memory that decoding takes anyway, products of few tokens are not worth computing again. Where
the number of tokens varies, it is the largest of varying size, which is the input: the batch at
hand may be a short one, and the longest decides how much memory a run needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from inductor_q.capture.example import hint
from inductor_q.context import Context
from inductor_q.passes.graph import backward_nodes, is_tensor, tensor
from inductor_q.passes.products import as_product, is_projection, is_rank
from inductor_q.passes.runner import Site

_SEGMENT = "ac_graph_id"


class RecomputeProducts:
    name: ClassVar[str] = "recompute_products"
    stage: ClassVar[str] = "partition"

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        most = context.threshold("recompute_products.max_kept")
        for segment, (unmarked, source) in _segments(graph).items():
            products = [n for n in unmarked if _is_wide(n)]
            varying = [n for n in source if _varies(n)]
            rest = most * max((_bytes(n) for n in varying or source), default=0)
            again = []
            for node in sorted(products, key=_bytes):
                rest -= _bytes(node)
                if rest < 0:
                    again.append(node)
                else:
                    reason = f"kept: recompute_products.max_kept={most} times what is read"
                    yield Site(node, rejected=reason, by_choice=True)
            kept = set(products).difference(again)
            plan = (segment, tuple(n for n in unmarked if n not in kept))
            for node in again:
                yield Site(node, plan=plan, bytes_saved=_bytes(node))
                plan = (segment, ())

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        segment, nodes = site.plan
        for node in nodes:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            node.meta[_SEGMENT] = segment


def _segments(graph: fx.Graph) -> dict[int, tuple[list[fx.Node], list[fx.Node]]]:
    """Find of each segment the nodes without a mark, and what the segment reads that another one,
    or none, computes. A node without a mark is inside where it leads from and to marked nodes."""
    backward = backward_nodes(graph)
    forward = [n for n in graph.nodes if n.op == "call_function" and n not in backward]
    marks = {n: n.meta.get(_SEGMENT) for n in forward if "recompute" in n.meta}
    comes_from: dict[fx.Node, set[int]] = {}
    leads_to: dict[fx.Node, set[int]] = {}
    for found, order in ((comes_from, forward), (leads_to, forward[::-1])):
        for node in order:
            near = node.all_input_nodes if found is comes_from else node.users
            mark = marks.get(node)
            found[node] = (
                set().union(*(found.get(n, set()) for n in near)) if mark is None else {mark}
            )
    inside: dict[fx.Node, int] = {}
    segments: dict[int, tuple[list[fx.Node], list[fx.Node]]] = {}
    for node in forward:
        for segment in comes_from[node] & leads_to[node]:
            unmarked, source = segments.setdefault(segment, ([], []))
            inside[node] = segment
            if node not in marks:
                unmarked.append(node)
            source += [n for n in node.all_input_nodes if _is_other(n, segment, inside)]
    return segments


def _is_other(node: fx.Node, segment: int, inside: dict[fx.Node, int]) -> bool:
    """Whether a tensor comes from outside of a segment, and is no parameter: of the placeholders,
    those whose sizes vary are the model's inputs."""
    if not is_tensor(node) or inside.get(node) == segment:
        return False
    return node.op == "call_function" or _varies(node)


def _is_wide(node: fx.Node) -> bool:
    """Whether a node is a product with a whole weight: neither one of an adapter's two."""
    product = as_product(node)
    if product is None or is_projection(product):
        return False
    return not is_rank(product.inner, product.cols)


def _varies(node: fx.Node) -> bool:
    return not isinstance(tensor(node).numel(), int)


def _bytes(node: fx.Node) -> int:
    value = tensor(node)
    return hint(value.numel()) * value.element_size()
