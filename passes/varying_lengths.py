"""Attention whose lengths vary is computed by kernels that serve every length.

On Hopper and later GPUs `scaled_dot_product_attention` prefers cuDNN, which builds a plan for each
shape it has not seen: 0.2 to 1 s of the host's time for forward, recompute and backward. Batches
that a collator pads to their longest sequence seldom have the same length, so nearly each step
waited for that. FlashAttention, or the memory-efficient kernel where there is a mask, needs no
plan. Where the length is fixed cuDNN stays, which is up to twice as fast on long sequences.

AOTAutograd has chosen the kernel by now, so it is known which calls are cuDNN's.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from inductor_q.context import Context
from inductor_q.passes.dynamo_graph import same_size
from inductor_q.passes.graph import argument, emit, replace, tensor
from inductor_q.passes.grouped_keys import HEAD_DIM
from inductor_q.passes.runner import Site

aten = torch.ops.aten
CUDNN = aten._scaled_dot_product_cudnn_attention.default
CUDNN_BACKWARD = aten._scaled_dot_product_cudnn_attention_backward.default
FLASH = aten._scaled_dot_product_flash_attention.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default

#: The place of each result of cuDNN's that backward reads among those of the other kernels: the
#: output, the logarithms of sums of exponentials, two of lengths that are not ours, and the seeds.
_OF_FLASH = {place: place for place in range(9)}
_OF_EFFICIENT = {0: 0, 1: 1, 6: 2, 7: 3}
#: Those of cuDNN's that are lengths -> which operand's; the program's own sizes may be read there.
_LENGTHS = {4: 0, 5: 1}
#: What autograd makes of a result that it keeps.
_SHOWN = frozenset({aten.alias.default, aten.detach.default})
#: FlashAttention reads features in groups of so many.
_FEATURES = 8


@dataclass(frozen=True)
class _Plan:
    """The bias of a call, its results by their place, and the calls of its backward."""

    bias: fx.Node | None
    results: dict[Any, list[fx.Node]]
    backward: list[fx.Node]


class VaryingLengths:
    name: ClassVar[str] = "varying_lengths"
    stage: ClassVar[str] = "joint"

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        for node in graph.find_nodes(op="call_function", target=CUDNN):
            lengths = [tensor(x).shape[-2] for x in node.args[:2]]
            if all(isinstance(length, int) for length in lengths):
                continue
            bias = argument(node, "attn_bias")
            results: dict[Any, list[fx.Node]] = {}
            for item in node.users:
                results.setdefault(item.args[1], []).append(item)
            readers = [user for item in results.get(0, ()) for user in _readers(item)]
            backward = [user for user in readers if user.target is CUDNN_BACKWARD]
            if reason := _refused(node, bias) or _read_elsewhere(results, backward):
                yield Site(node, rejected=reason, by_choice=True)
                continue
            kernel = "FlashAttention" if bias is None else "memory-efficient attention"
            yield Site(node, plan=_Plan(bias, results, backward), provider=kernel)

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        plan: _Plan = site.plan
        node, bias = site.node, plan.bias
        query, key, value = node.args[:3]
        dropout, is_causal = argument(node, "dropout_p"), argument(node, "is_causal")
        scale, keeps = argument(node, "scale"), argument(node, "compute_log_sumexp")
        with graph.inserting_before(node):
            if bias is None:
                given: tuple[Any, ...] = (query, key, value, dropout, is_causal)
                new, places = emit(graph, FLASH, given, node, scale=scale), _OF_FLASH
            else:
                bias = _spread(graph, bias, node)
                given = (query, key, value, bias, keeps, dropout, is_causal)
                new, places = emit(graph, EFFICIENT, given, node, scale=scale), _OF_EFFICIENT
            made = {
                place: emit(graph, operator.getitem, (new, place), node)
                for place in sorted(places.values())
            }
        for old in plan.backward:
            gradient = old.args[0]
            before = (query, key, value)
            with graph.inserting_before(old):
                read: tuple[fx.Node, ...]
                if bias is None:
                    read = (made[0], made[1], made[2], made[3], made[4], made[5])
                    given = (gradient, *before, *read, dropout, is_causal, made[6], made[7])
                    back = emit(graph, FLASH_BACKWARD, given, old, scale=scale)
                else:
                    read = (bias, made[0], made[1], made[2], made[3])
                    wanted = [True, True, True, False]
                    given = (gradient, *before, *read, dropout, wanted, is_causal)
                    back = emit(graph, EFFICIENT_BACKWARD, given, old, scale=scale)
                for item in list(old.users):
                    replace(item, emit(graph, operator.getitem, (back, item.args[1]), old))
                    graph.erase_node(item)
            graph.erase_node(old)
        for place, items in plan.results.items():
            for item in items:
                if place == 0:
                    replace(item, made[0])
                elif item.users:
                    with graph.inserting_before(node):
                        size = (node.args[_LENGTHS[place]], -2)
                        replace(item, emit(graph, aten.sym_size.int, size, node))
                graph.erase_node(item)
        graph.erase_node(node)  # which is random for FX, so it would stay


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what reads a result, itself or as autograd shows it to backward."""
    for user in node.users:
        if user.target in _SHOWN:
            yield from _readers(user)
        else:
            yield user


def _refused(node: fx.Node, bias: fx.Node | None) -> str:
    """Return why no other kernel takes a call of cuDNN's; empty if one does."""
    query, key, value = (tensor(x) for x in node.args[:3])
    if dropout := argument(node, "dropout_p"):
        return f"attention drops scores out (dropout_p={dropout}), by a random state of cuDNN's"
    features = query.shape[-1]
    if not isinstance(features, int) or features > HEAD_DIM or features % _FEATURES:
        return f"the other kernels take up to {HEAD_DIM} features in groups of {_FEATURES}"
    if not same_size(features, value.shape[-1]):
        return "values differ from queries in features"
    if argument(node, "is_causal") and not same_size(query.shape[-2], key.shape[-2]):
        return "attention is causal, and queries and keys differ in length"
    if bias is not None and not same_size(query.shape[1], key.shape[1]):
        return "no other kernel takes grouped keys under a mask"
    return ""


def _read_elsewhere(results: dict[Any, list[fx.Node]], backward: list[fx.Node]) -> str:
    """Return that something but backward reads what cuDNN's backward is for; else nothing."""
    known = {0, *_LENGTHS}
    others = [item for place, items in results.items() if place not in known for item in items]
    if all(user in backward for item in others for user in _readers(item)):
        return ""
    return "the graph reads more of it than its output and lengths"


def _spread(graph: fx.Graph, bias: fx.Node, node: fx.Node) -> fx.Node:
    """Show a bias for each head of each sequence."""
    query, key = node.args[:2]
    read = ((query, 0), (query, 1), (query, 2), (key, 2))
    sizes = [
        size
        if isinstance(size := tensor(x).shape[dim], int)
        else emit(graph, aten.sym_size.int, (x, dim), node)
        for x, dim in read
    ]
    return emit(graph, aten.expand.default, (bias, sizes), node)
