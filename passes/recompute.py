"""Say of a value whether backward computes it again or reads what forward has kept.

A pointwise input of a product is computed again. Forward reads the input of a layer once; backward
reads it for the gradient of the adapter. What it is computed from (the residual stream, a gate and
its factor) is kept for its own backward anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import fx
from torch._functorch.partitioners import get_default_op_list
from torch.utils.checkpoint import CheckpointPolicy

from inductor_q.passes.graph import MADE, VIEWS, is_nested, is_view

RECOMPUTED = (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE)

# The key in `meta` of what `keep_once` names.
_KEPT = "qfuse_kept"

_ops = functools.cache(get_default_op_list)


def is_checkpointed(node: fx.Node) -> bool:
    """Whether checkpointing alone wants a value to be computed again: nobody asked for this one."""
    return node.meta.get("recompute") is CheckpointPolicy.PREFER_RECOMPUTE


def keep_once(
    source: fx.Node, key: Hashable, like: fx.Node, *, make: Callable[[], fx.Node]
) -> fx.Node:
    """Return a small tensor of forward that backward reads, made for the first who asks.

    Other passes and checkpointing would have backward compute it again. functorch makes one of what
    is the same, but since torch 2.15 not of what forward alone reads, as for the last product of a
    layer that is compiled by itself, and what backward does.

    Args:
        source: what it is made of; its `meta` remembers it for the rest of the pass.
        key: what those have in common who ask for the same.
        like: the node before which it is wanted.
        make: emits it there.
    """
    known = source.meta.setdefault(MADE, {})
    found: fx.Node | None = known.get(key)
    if found is None or not found < like:
        found = known[key] = make()
        found.meta |= {"recompute": CheckpointPolicy.MUST_SAVE, _KEPT: True}
    return found


def is_kept(node: fx.Node) -> bool:
    """Whether `keep_once` names a value. (A policy of the user's may keep others.)"""
    return _KEPT in node.meta


def recompute_in_backward(x: fx.Node) -> None:
    """Tell the partitioner to compute a pointwise tensor of forward, and its views, in backward.

    The forward pass may not write to what it is computed from (`recomputed_from`). A nested compile
    region is left alone: Inductor (2.13) may overwrite in place what its backward takes, and that
    would be the caller's tensor.
    """
    if is_nested(x.graph):
        return
    if not is_pointwise(x) or "recompute" in x.meta:
        return
    # A view that is not marked would be kept in its place.
    for node in (x, *(user for user in x.users if user.target in VIEWS)):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def recomputed_from(blocks: Sequence[fx.Node], backward: set[fx.Node]) -> set[fx.Node]:
    """Find what backward reads to compute forward's blocks again: through pointwise operations, and
    through what the partitioner may compute again or keep as a view of its input."""
    todo = [x for x in blocks if x not in backward and is_pointwise(x)]
    found: set[fx.Node] = set()
    while todo:
        new = set(todo.pop().all_input_nodes) - found
        found |= new
        todo += [n for n in new if is_pointwise(n) or _ops().is_recomputable(n) or is_view(n)]
    return found


def is_pointwise(node: fx.Node) -> bool:
    """Whether torch says that an operator is element-wise."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())
