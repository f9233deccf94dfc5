"""Attention whose lengths vary is computed by FlashAttention, which serves every length.

On GPUs of compute capability 9.x and 10.x `scaled_dot_product_attention` prefers cuDNN, which
builds a plan for each shape that it has not seen, for forward, recompute and backward: 1 s of the
host's time on a B200 (github.com/modelscope/FunASR/issues/3704). Batches that a collator pads to
their longest sequence seldom have the same length, so nearly each step waited for that.
FlashAttention needs no plan. Where the length is fixed cuDNN stays, which is faster on long
sequences.

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
from inductor_q.ops.registry import define_ops
from inductor_q.passes.dynamo_graph import same_size
from inductor_q.passes.graph import argument, emit, readers, replace, tensor
from inductor_q.passes.grouped_keys import HEAD_DIM
from inductor_q.passes.runner import Site

define_ops()  # the vocabulary

aten = torch.ops.aten
CUDNN = torch.ops.aten._scaled_dot_product_cudnn_attention.default
CUDNN_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
FLASH_BACKWARD = torch.ops.qfuse.flash_attention_backward.default

#: Places in what both kernels return: the result, and the logarithms of the sums of exponentials.
_OUT, _SUMS = 0, 1
#: Where cuDNN's also returns a length, of queries and of keys -> the operand to read it of instead.
_LENGTHS = {4: 0, 5: 1}
#: What autograd makes of a result that it keeps.
_SHOWN = frozenset({aten.alias.default, aten.detach.default})
#: FlashAttention reads features in groups of so many.
_FEATURES = 8


@dataclass(frozen=True)
class _Plan:
    """The results of a call by their place, and the calls of its backward."""

    results: dict[Any, list[fx.Node]]
    backward: list[fx.Node]


class VaryingLengths:
    name: ClassVar[str] = "varying_lengths"
    stage: ClassVar[str] = "joint"

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        for node in graph.find_nodes(op="call_function", target=CUDNN):
            if all(isinstance(tensor(x).shape[-2], int) for x in node.args[:2]):
                continue
            results: dict[Any, list[fx.Node]] = {}
            for item in node.users:
                results.setdefault(item.args[1], []).append(item)
            readings = [user for item in results.get(_OUT, ()) for user in readers(item, _SHOWN)]
            backward = [user for user in readings if user.target is CUDNN_BACKWARD]
            reason = context.attention or _refused(node) or _read_elsewhere(results, backward)
            if reason:
                yield Site(node, rejected=reason, by_choice=True)
            else:
                yield Site(node, plan=_Plan(results, backward), provider="FlashAttention")

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        plan: _Plan = site.plan
        node = site.node
        operands, is_causal = node.args[:3], argument(node, "is_causal")
        scale = argument(node, "scale")
        with graph.inserting_before(node):
            new = emit(graph, FLASH, (*operands, 0.0, is_causal), node, scale=scale)
            out, sums = (emit(graph, operator.getitem, (new, i), node) for i in (_OUT, _SUMS))
            sizes = {
                place: emit(graph, aten.sym_size.int, (operands[i], 2), node)
                for place, i in _LENGTHS.items()
                if any(item.users for item in plan.results.get(place, ()))
            }
        for old in plan.backward:
            with graph.inserting_before(old):
                given = (old.args[0], *operands, out, sums, is_causal)
                gradients = emit(graph, FLASH_BACKWARD, given, old, scale=scale)
                for item in list(old.users):
                    replace(item, emit(graph, operator.getitem, (gradients, item.args[1]), old))
                    graph.erase_node(item)
            graph.erase_node(old)
        stands_in = {_OUT: out, **sizes}
        for place, items in plan.results.items():
            for item in items:
                if place in stands_in:
                    replace(item, stands_in[place])
                graph.erase_node(item)
        graph.erase_node(node)  # which is random for FX, so it would stay


def _refused(node: fx.Node) -> str:
    """Return why FlashAttention does not take a call of cuDNN's; empty if it does."""
    query, key, value = (tensor(x) for x in node.args[:3])
    if argument(node, "attn_bias") is not None:
        return "attention has a mask, and FlashAttention takes none"
    if dropout := argument(node, "dropout_p"):
        return f"attention drops scores out (dropout_p={dropout}), by a random state of cuDNN's"
    if any(same_size(stride, 0) for x in (query, key, value) for stride in x.stride()):
        return "one head is shown several times"
    if not all(same_size(x.stride(-1), 1) for x in (query, key, value)):
        return "features do not lie side by side"
    features = query.shape[-1]
    if not isinstance(features, int) or features > HEAD_DIM or features % _FEATURES:
        return f"FlashAttention takes up to {HEAD_DIM} features, in groups of {_FEATURES}"
    if not same_size(features, value.shape[-1]):
        return "values differ from queries in features"
    if not same_size(key.shape[1], value.shape[1]):
        return "keys and values differ in heads"
    if argument(node, "is_causal") and not same_size(query.shape[-2], key.shape[-2]):
        return "attention is causal, and queries and keys differ in length"
    return ""


def _read_elsewhere(results: dict[Any, list[fx.Node]], backward: list[fx.Node]) -> str:
    """Return that something but backward reads what cuDNN's backward is for; else nothing."""
    known = {_OUT, *_LENGTHS}
    others = [item for place, items in results.items() if place not in known for item in items]
    if all(user in backward for item in others for user in readers(item, _SHOWN)):
        return ""
    return "the graph reads more of it than its output and lengths"
