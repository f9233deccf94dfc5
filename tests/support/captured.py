"""Run a pass on Dynamo's graphs, without generating code."""

from __future__ import annotations

from typing import Any

import torch

from inductor_q.capture.dynamo import input_sources
from inductor_q.context import Context, new_report
from inductor_q.hooks import run_stage
from inductor_q.logits import with_logits
from inductor_q.options import resolve
from inductor_q.passes.runner import CAPTURED
from inductor_q.records import SiteRecord


class CapturedStage:
    """A backend that runs one of our passes on Dynamo's graph, and then the graph as it is."""

    def __init__(self, name: str, **options: Any) -> None:
        self.name = name
        self.options = {"qfuse.passes": [name], **options}
        self.sites: list[SiteRecord] = []
        self.graphs: list[torch.fx.Graph] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        device = torch.device("cpu")
        resolved = resolve(None, self.options, device=device, dynamic=False)
        report = new_report(resolved, device)
        context = Context(resolved, report, input_sources(gm))
        run_stage(CAPTURED, gm.graph, context)
        for module in gm.modules():
            if isinstance(module, torch.fx.GraphModule):
                module.recompile()
        self.sites += [site for site in report.sites if site.pass_name == self.name]
        self.graphs.append(gm.graph)
        return with_logits(gm.forward, gm, context.recipes) if context.recipes else gm.forward
