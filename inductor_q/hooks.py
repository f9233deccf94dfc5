"""The hooks handed to Inductor: one object a stage, each part of the cache key.

`uuid()` covers all of our sources, the resolved options and whatever pass the user already had in
the hook, so the FX-graph cache and the AOTAutograd cache stay on and stay right: lowerings are in
no key of torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn

from inductor_q.cache import source_digest
from inductor_q.context import Context
from inductor_q.passes import PIPELINE
from inductor_q.passes.runner import run


def run_stage(stage: str, graph: fx.Graph, context: Context, *, edit: bool = True) -> None:
    """Run the enabled passes of `stage` in the order of the pipeline; `edit` as of `run`."""
    for step in PIPELINE:
        if step.stage == stage and step.name in context.resolved.passes:
            run(step, graph, context, edit=edit)


class _Hook:
    """What both hooks share: the context, the pass that was there before, the key."""

    def __init__(self, context: Context, previous: Any) -> None:
        self.context = context
        self.previous = previous

    def uuid(self) -> Any:
        previous = previous_uuids(self.previous)
        if previous is None:
            return None  # an uncacheable pass of the user's: torch bypasses its caches
        return ("qfuse", source_digest(), self.context.resolved.fingerprint(), *previous)

    def __getstate__(self) -> dict[str, Any]:
        # Torch's caches hash the pickled configuration, hooks included: a hook is its key.
        return {"key": self.uuid()}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return self  # Inductor copies its configuration; the context is shared


def previous_uuids(previous: Any) -> tuple[Any, ...] | None:
    """The keys of the passes that a hook held before; None where one of them has none."""
    hooks = previous if isinstance(previous, (list, tuple)) else [previous]
    found = []
    for hook in hooks:
        if hook is None:
            continue
        value = hook.uuid() if hasattr(hook, "uuid") else None
        if not value:
            return None
        found.append(value)
    return tuple(found)


class JointPasses(_Hook, CustomGraphPass):
    """The joint stage: forward and backward in one graph, or an inference graph."""

    def __call__(self, graph: fx.Graph) -> None:
        run_stage("joint", graph, self.context)
        hooks = self.previous if isinstance(self.previous, (list, tuple)) else [self.previous]
        for hook in hooks:
            if hook is not None:
                hook(graph)


class Partitioner(_Hook, CustomPartitionerFn):
    """The partition stage: tag what must not be saved, then partition as functorch does."""

    def __call__(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        *,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.context.static_inputs = frozenset(static_lifetime_input_indices or ())
        run_stage("partition", gm.graph, self.context)
        partition: Callable[..., Any] = self.previous or min_cut_rematerialization_partition
        result: tuple[fx.GraphModule, fx.GraphModule] = partition(
            gm, joint_inputs, static_lifetime_input_indices=static_lifetime_input_indices, **kwargs
        )
        return result


__all__ = ["JointPasses", "Partitioner", "run_stage"]
