"""Partition a joint graph knowing that attention without dropout draws no random numbers.

Torch tags every kernel of scaled_dot_product_attention as random, since each can drop weights of
attention. The partitioner goes by the tag: where a checkpointed segment computes attention again,
it has forward hand the generator's state to backward, and puts each call into a higher-order op
that sets the state and restores it, which the host waits for. With dropout_p=0
no kernel reads the state. While the partitioner runs, such calls have a function without tags as
their target.

Under `fallback_random` every call stays as eager mode has it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import fx
from torch._inductor import config
from torch._ops import OpOverload

from inductor_q.memory import Pair
from inductor_q.passes.graph import argument
from inductor_q.passes.recompute import RECOMPUTED

_ATTENTION = "aten::_scaled_dot_product_"


def partition_seedless(partition: Callable[[fx.GraphModule], Pair], gm: fx.GraphModule) -> Pair:
    """Call `partition`, to which attention without dropout is no random op."""
    if config.fallback_random:
        return partition(gm)
    for node in _marked(gm.graph.nodes):
        node.target = _untagged(node.target)
    pair = partition(gm)
    for module in (gm, *pair):
        for node in module.graph.nodes:
            node.target = getattr(node.target, "attention", node.target)
        module.recompile()
    return pair


def _marked(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Find what is computed again. (Where torch decides, attention has to be known as such.)"""
    again = [node for node in nodes if node.meta.get("recompute") in RECOMPUTED]
    return [node for node in again if _is_attention_without_dropout(node)]


def _is_attention_without_dropout(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or not node.target.name().startswith(_ATTENTION):
        return False
    return bool(argument(node, "dropout_p") == 0)


@functools.cache
def _untagged(attention: OpOverload) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return attention(*args, **kwargs)

    call.__name__ = call.__qualname__ = attention.name().rpartition("::")[2].replace(".", "_")
    call.attention = attention  # type: ignore[attr-defined]
    return call
