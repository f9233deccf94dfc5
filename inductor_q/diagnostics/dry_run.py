"""Find out what qfuse would do with a graph that another backend compiles.

The pipeline runs on a copy of the joint graph, in the place where the real one would run, and the
copy is thrown away. On Dynamo's graph, which has others in it, the passes only look. The graph that
is compiled is not touched, and no guard is added.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from inductor_q.capture.dynamo import counterparts
from inductor_q.context import Context, new_report
from inductor_q.graph_report import Report
from inductor_q.hooks import passes_off, run_stage
from inductor_q.options import resolve
from inductor_q.passes.chunk_loss import would_chunk
from inductor_q.passes.runner import CAPTURED


@dataclass
class DryRun:
    """Run the passes over copies of one compile's graphs; torch's hooks fill `report`."""

    context: Context
    copies: list[fx.Graph] = field(default_factory=list)

    @property
    def report(self) -> Report:
        return self.context.report

    def captured(self, graph: fx.Graph) -> None:
        """Run the captured stage: each of its passes looks at the graph as it is."""
        self._run(CAPTURED, graph, edit=False)

    def would_chunk(self, graph: fx.Graph) -> bool:
        """Whether the graph has a loss that qfuse computes in chunks, with no packed weight."""
        with _no_guards(graph):
            return would_chunk(graph, self.context)

    def joint(self, graph: fx.Graph) -> None:
        """Run the joint stage on a copy that is kept for the partition stage."""
        own = copy.deepcopy(graph)
        self.copies.append(own)
        self._run("joint", own)

    def partition(self, graph: fx.Graph, static_inputs: Sequence[int]) -> None:
        """Run the partition stage on the copy of the graph that is being partitioned."""
        self.context.note_static(static_inputs)
        names = [node.name for node in graph.find_nodes(op="placeholder")]
        for own in self.copies:
            if [node.name for node in own.find_nodes(op="placeholder")] == names:
                self._run("partition", own)
        self.copies.clear()

    def _run(self, stage: str, graph: fx.Graph, *, edit: bool = True) -> None:
        with _no_guards(graph):
            run_stage(stage, graph, self.context, edit=edit)


def dry_run(
    gm: fx.GraphModule,
    device: torch.device,
    dynamic: bool,
    sources: Sequence[str],
    weights: Sequence[str],
) -> DryRun:
    """Start a run with the options that qfuse would have by default here (environment included)."""
    resolved = resolve(None, None, device=device, dynamic=dynamic)
    report = new_report(resolved, device)
    report.weights, report.off = list(weights), passes_off(resolved)
    return DryRun(Context(resolved, report, sources, counterparts=counterparts(gm, sources)))


@contextlib.contextmanager
def _no_guards(graph: fx.Graph) -> Any:
    """Keep what the passes compare from becoming a condition of the compiled code."""
    from torch._guards import detect_fake_mode

    inputs = graph.find_nodes(op="placeholder")
    values = [node.meta.get("val", node.meta.get("example_value")) for node in inputs]
    mode = detect_fake_mode([v for v in values if isinstance(v, torch.Tensor)])
    shape_env = getattr(mode, "shape_env", None)
    with shape_env.suppress_guards() if shape_env is not None else contextlib.nullcontext():
        yield
