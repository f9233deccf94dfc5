"""The context that the passes of one compile share: options, report, names of the weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._guards import CompileContext
from torch._inductor import config as inductor_config

from inductor_q.capture.dynamo import (
    held_by_modules,
    input_index,
    module_names,
    module_path,
    source_name,
    weight_path,
)
from inductor_q.capture.library import Weight
from inductor_q.capture.packed import holds_codes
from inductor_q.formats import get_format
from inductor_q.frames import user_frame
from inductor_q.graph_report import Report, SiteRecord
from inductor_q.kernels.dequantize import compiled_by, not_callable
from inductor_q.kernels.dispatch import served_by
from inductor_q.kernels.expert_calls import Scatter2Scatter
from inductor_q.kernels.scatter2scatter_dequantize import Large, preferred
from inductor_q.logits import Recipe
from inductor_q.resolved import Budget, Resolved

_STEP = re.compile(r"\['([^']+)'\]|(\w+)")


@dataclass
class Context:
    """Hold what passes share, from the backend's call until the (lazily compiled) backward is done.

    `sources` are Dynamo's names of the graph inputs, in their order, from which module paths come;
    `static_inputs` are those of them that live across steps, known once partitioning starts;
    `frozen` are those that are weights of 16 bits that do not train;
    `counterparts` are the layers that share the graph of a nested compile region. `tag` makes
    torch's caches keep the graph of a compile apart from that of others: under `qfuse.strict` a
    graph is found only together with its report. `recipes` are for outputs of the graph that the
    backend makes of others. `budget` is what `qfuse.memory` leaves to the graph. `changed` is to
    be called where passes have run behind the compile, which a lazily compiled backward has.
    `attention` says why attention keeps the kernels that torch takes; else it is empty.
    """

    resolved: Resolved
    report: Report
    sources: Sequence[str] = ()
    static_inputs: frozenset[int] = frozenset()
    frozen: frozenset[int] = frozenset()
    counterparts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tag: str = ""
    recipes: list[Recipe] = field(default_factory=list)
    budget: Budget | None = None
    changed: Callable[[], None] | None = None
    attention: str = ""

    def note_static(self, indices: Iterable[int]) -> None:
        """Note which inputs live across steps: those that torch names, and what modules hold."""
        self.static_inputs = frozenset(indices) | held_by_modules(self.sources)

    @property
    def numerics(self) -> str:
        return self.resolved.numerics

    def threshold(self, name: str) -> int:
        """Return the threshold in force."""
        return self.resolved.threshold(name)

    def kernel(self, op: str) -> str:
        """Return the provider that the user, or else the preset, chose for `op`, or else "auto"."""
        return self.resolved.kernels.get(op, "auto")

    def expert_kernel(self, call: Scatter2Scatter) -> str:
        """Return the provider that will compute a product with experts in this compile."""
        wanted = preferred(call, self.kernel("scatter2scatter"), self.decoded_from())
        return served_by("scatter2scatter", call, wanted)

    def decoded_from(self) -> Large | None:
        """Return from which sizes on experts are decoded first here; None: they never are.

        They are in memory then, so under a budget (`qfuse.memory`) they never are; nor are they in
        C++ wrapper code, which calls the op.
        """
        if self.resolved.memory is not None or self.has_cpp_wrapper:
            return None
        return Large(
            elements=self.threshold("fuse_scatter2scatter.min_elements_of_large"),
            rows=self.threshold("fuse_scatter2scatter.min_rows_of_large"),
            elements_transposed=self.threshold(
                "fuse_scatter2scatter.min_elements_of_large_transposed"
            ),
            rows_transposed=self.threshold("fuse_scatter2scatter.min_rows_of_large_transposed"),
        )

    @property
    def has_cpp_wrapper(self) -> bool:
        return bool(self.resolved.inductor.get("cpp_wrapper", inductor_config.cpp_wrapper))

    def dequantizer(self, device: torch.device, weight: Weight | None = None) -> str:
        """Return the provider that will dequantize on a device here: this weight, or any other."""
        fmt, shape = (get_format(weight.format), weight.shape) if weight else (None, None)
        barred = not_callable(shape, self.has_cpp_wrapper)
        return compiled_by(device.type, self.kernel("dequantize"), fmt, barred)

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
        plain: bool = False,
        op: str = "",
        nested: bool = False,
    ) -> SiteRecord:
        """Make the record of a site (`nested`: in a region). Call it before the graph is edited."""
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
            plain=plain,
            op=op,
            also=self.counterparts.get(module, ()) if nested else (),
        )

    def module_path(self, weight: fx.Node | None) -> str:
        """Return the path of the module that owns a packed weight, by Dynamo's name of it; with the
        weight's own name where a module may have several."""
        if weight is None:
            return ""
        index = input_index(weight)
        if index is None:  # an input of Dynamo's graph, or of none that is known
            return module_path(source_name(getattr(weight, "_dynamo_source", None)))
        if index >= len(self.sources):
            return ""
        value = weight.meta.get("val")
        path = weight_path if value is not None and holds_codes(value) else module_path
        return path(self.sources[index])

    def _from_stack(self, node: fx.Node) -> str:
        """Return the innermost module of the traced call, from where the names of the inputs start.

        Torch's own name may begin at a variable that holds the module ("G['model']",
        "L['trainer'].model").
        """
        names = _called(node)
        start = next((i for i, name in enumerate(names) if name in self._roots), 0)
        return ".".join(names[start:])

    @cached_property
    def _roots(self) -> frozenset[str]:
        return frozenset(names[0] for names in map(module_names, self.sources) if names)


def new_report(resolved: Resolved, device: torch.device) -> Report:
    """Make an empty report that says under which options a graph is compiled."""
    values = {
        **resolved.inductor,
        "qfuse.numerics": resolved.numerics,
        "qfuse.compute": resolved.compute,
        "qfuse.compute.exclude": ",".join(resolved.exclude),
        "qfuse.memory": resolved.memory,
        "qfuse.offload": resolved.offload,
    }
    compile_id = CompileContext.current_compile_id()
    return Report(
        graph=f"{compile_id}, {'training' if torch.is_grad_enabled() else 'inference'}",
        preset=resolved.preset.name,
        preset_reason=resolved.preset.reason,
        torch=torch.__version__,
        device=str(device),
        numerics=resolved.numerics,
        compute=resolved.compute,
        options={
            key: {"value": str(values.get(key, "")), "source": source}
            for key, source in resolved.sources.items()
        },
    )


def _called(node: fx.Node) -> list[str]:
    """Return the names on the way to the innermost module of a traced call.

    They are the same whichever way Dynamo spells them.
    """
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    path = ""
    for entry in stack.values():
        path = entry[0]
    names = (bracket or dotted for bracket, dotted in _STEP.findall(path.removeprefix("L['self']")))
    return [n for n in names if n not in ("__dict__", "_modules", "base_layer", "parametrizations")]


def _number(size: Any) -> int:
    return size if isinstance(size, int) else -1
