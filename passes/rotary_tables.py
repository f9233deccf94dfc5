"""Make the cosines and sines of rotary embeddings once, for all heads of all layers.

Inductor computes a pointwise value again in each kernel that reads it, unless it is long to write
down. A cosine takes many instructions on a GPU, and each layer's kernels for queries and keys, in
forward, recompute and backward, took one for every feature of every head. Here it becomes a tensor
of positions and features, in the dtype in which layers read it, as it is in eager mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import fx

from inductor_q.capture.example import hint
from inductor_q.context import Context
from inductor_q.passes.graph import (
    CAST,
    MUL,
    PERMUTE,
    VIEWS,
    is_tensor,
    readers,
    same_shape,
    tensor,
)
from inductor_q.passes.products import MATERIALIZE
from inductor_q.passes.runner import Site

aten = torch.ops.aten
_TABLES = frozenset({aten.cos.default, aten.sin.default})
_SPREADS = VIEWS | {aten.unsqueeze.default, aten.expand.default}


class RotaryTables:
    name: ClassVar[str] = "rotary_tables"
    stage: ClassVar[str] = "joint"

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        for node in graph.nodes:
            if node.target in _TABLES and is_tensor(node):
                table = _as_read(node)
                if sum(_spreads(user, table) for user in readers(table, _SPREADS)) > 1:
                    yield Site(node, plan=table, provider="inductor")

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        table: fx.Node = site.plan
        with graph.inserting_after(table):
            made = graph.call_function(MATERIALIZE, (table,))
        made.meta = {**table.meta, "val": MATERIALIZE(tensor(table))}
        # A result of the program's keeps its layout.
        readers = {user for user in table.users if user is not made and not _is_returned(user)}
        table.replace_all_uses_with(made, delete_user_cb=lambda user: user in readers)


def _as_read(node: fx.Node) -> fx.Node:
    """Return what layers read of a cosine: it scaled by a number, in their dtype."""
    while len(node.users) == 1:
        (user,) = node.users
        if user.target not in (CAST, MUL) or len(user.all_input_nodes) != 1:
            break
        node = user
    return node


def _is_returned(user: fx.Node) -> bool:
    """Whether a reader is the graph's output, or a view that is one of its results."""
    if user.target in _SPREADS or user.target is PERMUTE:
        return any(_is_returned(u) for u in user.users)
    return user.op == "output"


def _spreads(user: fx.Node, table: fx.Node) -> bool:
    """Whether a reader has more elements than the table, so that each is computed several times."""
    if not is_tensor(user) or same_shape(user, table):
        return False
    return hint(tensor(user).numel()) > hint(tensor(table).numel())
