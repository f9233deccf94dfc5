"""The pass protocol, and how a pass is run.

`match` only looks; a site carries what to do, or the reason why it was rejected; `apply` only
edits. The runner counts, times, sorts, lints and reports, so "why did it not fuse" is data.

All sites of a pass are matched before the first is applied. What `apply` needs is in `site.plan`:
nodes, numbers and frozen dataclasses of them, found by `match` and by nothing else. Two rules keep
plans true while earlier sites edit the graph:

- A node that other plans may name is replaced by `graph.replace`: `graph.emit` then reads what
  stands in for it. So the order of the sites does not matter.
- Where one edit serves several places, `match` yields a site for each place that counts in the
  report. The first of them carries the plan of the whole group, the others carry None, which
  `apply` skips. (A group that counts once, as stacked products do, is one site.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from torch import fx
from torch._inductor.pattern_matcher import stable_topological_sort

from inductor_q.context import Context
from inductor_q.graph_report import PassRecord
from inductor_q.passes.graph import forget_marks, is_nested

#: The stage of Dynamo's graph, which may mutate and switch modes: AOTAutograd removes dead nodes.
CAPTURED = "captured"

#: The stage of the graphs that partitioning makes of one: forward's, then backward's.
PARTITIONED = "partitioned"

#: The stage of the graphs that Inductor lowers, behind its own passes: forward's, backward's, or an
#: inference graph. What it does to a backward with static shapes reaches the report at its first
#: run, which compiles it.
LOWERED = "lowered"


@dataclass(frozen=True)
class Site:
    """One place where a pass applies, or is refused for a reason that a user can act on.

    `node` anchors it in the graph, `weight` is the packed weight it is about (for its module path),
    `plan` is what `apply` needs, backward no longer keeps `bytes_saved`, and `provider` computes
    the rewritten site: by `op` of qfuse, where that reads the weight then. A rejection is
    `by_choice` where another plan is preferred: under `qfuse.strict` only the others are errors.
    `plain` says that the weight is not quantized.
    """

    node: fx.Node
    rejected: str = ""
    weight: fx.Node | None = None
    plan: Any = field(default=None, compare=False, repr=False)
    by_choice: bool = False
    provider: str = "aten"
    bytes_saved: int = 0
    plain: bool = False
    op: str = ""


class Pass(Protocol):
    name: ClassVar[str]
    stage: ClassVar[str]

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]: ...

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None: ...


#: Functions to call with the pass, the graph, and "before" or "after"; a dump adds one.
listeners: list[Callable[[Pass, fx.Graph, str], None]] = []


def run(step: Pass, graph: fx.Graph, context: Context, *, edit: bool = True) -> None:
    """Run one pass over `graph` and record what it did or, without `edit`, what it would do."""
    told = listeners if edit else []
    for listen in told:
        listen(step, graph, "before")
    start = time.perf_counter()
    sites = list(step.match(graph, context))
    nested = is_nested(graph)
    records = [
        context.describe(
            step.name,
            s.node,
            weight=s.weight,
            provider="" if s.rejected else s.provider,
            rejected=s.rejected,
            by_choice=s.by_choice,
            bytes_saved=s.bytes_saved,
            plain=s.plain,
            op="" if s.rejected else s.op,
            nested=nested,
        )
        for s in sites
    ]
    applied = [site for site in sites if not site.rejected]
    if applied and edit:
        for site in applied:
            step.apply(graph, site, context)
        forget_marks(graph)
        if step.stage != CAPTURED:
            stable_topological_sort(graph)
            graph.eliminate_dead_code()
        graph.lint()
    context.report.add(PassRecord(step.name, len(applied), time.perf_counter() - start), records)
    for listen in told:
        listen(step, graph, "after")
