"""What the passes of one compile share: the options in force, the report, the weights' names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from inductor_q.capture.dynamo import input_index, module_names, module_path
from inductor_q.formats import QuantFormat
from inductor_q.frames import user_frame
from inductor_q.kernels.calls import Scatter2Scatter
from inductor_q.kernels.dequantize import compiled_by
from inductor_q.kernels.dispatch import served_by
from inductor_q.report import Report, SiteRecord
from inductor_q.resolved import Resolved

_STEP = re.compile(r"\['([^']+)'\]|(\w+)")


@dataclass
class Context:
    """Lives from the backend's call until the (lazily compiled) backward is done.

    `sources` are Dynamo's names of the graph inputs, in their order: where module paths come from;
    `static_inputs` those of them that live across steps, known once partitioning starts;
    `counterparts` the layers that share the graph of a nested compile region. `tag` makes torch's
    caches keep the graph of a compile apart from that of others: under `qfuse.strict` one is found
    only together with its report.
    """

    resolved: Resolved
    report: Report
    sources: Sequence[str] = ()
    static_inputs: frozenset[int] = frozenset()
    counterparts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tag: str = ""

    @property
    def numerics(self) -> str:
        return self.resolved.numerics

    def threshold(self, name: str) -> int:
        """A threshold in force: the user's, else the preset's, which has every one."""
        return int(self.resolved.preset.thresholds[name].value)

    def kernel(self, op: str) -> str:
        """The provider asked for `op`: the user's, else the preset's, else "auto"."""
        return self.resolved.kernels.get(op, "auto")

    def expert_kernel(self, call: Scatter2Scatter) -> str:
        """Who will compute a product with experts in this compile."""
        return served_by("scatter2scatter", call, self.kernel("scatter2scatter"))

    def dequantizer(self, device: torch.device, fmt: QuantFormat | None = None) -> str:
        """Who will dequantize on a device in this compile, a weight in format `fmt`."""
        return compiled_by(device.type, self.kernel("dequantize"), fmt)

    def count_provider(self, op: str, provider: str) -> None:
        self.report.count_provider(op, provider)

    def describe(
        self,
        pass_name: str,
        node: fx.Node,
        *,
        weight: fx.Node | None = None,
        provider: str = "",
        rejected: str = "",
        by_choice: bool = False,
        bytes_saved: int = 0,
        nested: bool = False,
    ) -> SiteRecord:
        """The record of a site (`nested`: in a region); call it before the graph is edited."""
        value = node.meta.get("val", node.meta.get("example_value"))
        module = self.module_path(weight) or self._from_stack(node)
        return SiteRecord(
            pass_name=pass_name,
            target=str(node.target),
            module=module,
            source=user_frame(node),
            shape=tuple(_number(s) for s in getattr(value, "shape", ())),
            provider=provider,
            rejected=rejected,
            by_choice=by_choice,
            bytes_saved=bytes_saved,
            also=self.counterparts.get(module, ()) if nested else (),
        )

    def module_path(self, weight: fx.Node | None) -> str:
        """The path of the module that owns a packed weight, by Dynamo's name of the input."""
        if weight is None:
            return ""
        index = input_index(weight)
        if index is None or index >= len(self.sources):
            return ""
        return module_path(self.sources[index])

    def _from_stack(self, node: fx.Node) -> str:
        """The innermost module of the traced call, from where the inputs' names start: torch's own
        may begin at a variable that holds the module ("G['model']", "L['trainer'].model")."""
        names = _called(node)
        start = next((i for i, name in enumerate(names) if name in self._roots), 0)
        return ".".join(names[start:])

    @cached_property
    def _roots(self) -> frozenset[str]:
        return frozenset(names[0] for names in map(module_names, self.sources) if names)


def new_report(resolved: Resolved, device: torch.device) -> Report:
    """An empty report that says under which options a graph is compiled."""
    values = {**resolved.inductor, "qfuse.numerics": resolved.numerics}
    return Report(
        preset=resolved.preset.name,
        preset_reason=resolved.preset.reason,
        torch=torch.__version__,
        device=str(device),
        numerics=resolved.numerics,
        options={
            key: {"value": str(values.get(key, "")), "source": source}
            for key, source in resolved.sources.items()
        },
    )


def _called(node: fx.Node) -> list[str]:
    """The names on the way to the innermost module of a traced call, whichever way Dynamo spells
    them."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    path = ""
    for entry in stack.values():
        path = entry[0]
    names = (bracket or dotted for bracket, dotted in _STEP.findall(path.removeprefix("L['self']")))
    return [n for n in names if n not in ("__dict__", "_modules", "base_layer")]


def _number(size: Any) -> int:
    return size if isinstance(size, int) else -1
