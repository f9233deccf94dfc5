"""The hooks handed to Inductor: one object per stage, each part of the cache key.

`uuid()` covers all of our sources, the resolved options, for the lowered stage what this CPU
multiplies slowly, and whatever pass the user already had in
the hook, so the FX-graph cache and the AOTAutograd cache stay on and stay right: lowerings are in
no key of torch's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn

from inductor_q.cache import autocast_state, source_digest
from inductor_q.context import Context
from inductor_q.kernels import wide
from inductor_q.log import log, warn_once
from inductor_q.memory import Pair, plan
from inductor_q.passes import PIPELINE
from inductor_q.passes.graph import is_nested
from inductor_q.passes.runner import LOWERED, PARTITIONED, run
from inductor_q.resolved import Resolved
from inductor_q.seedless import partition_seedless


def run_stage(stage: str, graph: fx.Graph, context: Context, *, edit: bool = True) -> None:
    """Run the enabled passes of `stage` in the order of the pipeline; `edit` as of `run`."""
    for step in PIPELINE:
        if step.stage == stage and step.name in context.resolved.passes:
            run(step, graph, context, edit=edit)


def passes_off(resolved: Resolved) -> list[str]:
    """Return the passes that the options switch off, in the order of the pipeline."""
    return [step.name for step in PIPELINE if step.name not in resolved.passes]


class Hook(ABC):
    """Hook into Inductor's configuration, and also call what was configured there before."""

    def __init__(self, previous: Any) -> None:
        self.previous = previous

    @abstractmethod
    def own_key(self) -> tuple[str, ...]:
        """Return what this hook adds to the keys of torch's caches."""

    def uuid(self) -> Any:
        previous = previous_uuids(self.previous)
        if previous is None:
            return None  # an uncacheable pass of the user's: torch bypasses its caches
        return (*self.own_key(), *previous)

    def __getstate__(self) -> dict[str, Any]:
        # Torch's caches hash the pickled configuration, hooks included: a hook is its key.
        return {"key": self.uuid()}

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return self  # Inductor copies its configuration; what a hook holds is shared

    def run_previous(self, graph: fx.Graph) -> None:
        """Run the passes that the hook held before; a hook for passes calls this."""
        for hook in _listed(self.previous):
            hook(graph)

    def partition(self, *args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Call the partitioner that was configured before, or else functorch's."""
        partitioner: Callable[..., Any] = self.previous or min_cut_rematerialization_partition
        result: tuple[fx.GraphModule, fx.GraphModule] = partitioner(*args, **kwargs)
        return result


def previous_uuids(previous: Any) -> tuple[Any, ...] | None:
    """Return the keys of the passes that a hook held before; None where one of them has none."""
    found = [hook.uuid() if hasattr(hook, "uuid") else None for hook in _listed(previous)]
    return tuple(found) if all(found) else None


def _listed(previous: Any) -> list[Any]:
    hooks = previous if isinstance(previous, (list, tuple)) else [previous]
    return [hook for hook in hooks if hook is not None]


class _Passes(Hook):
    """Run our passes with one context."""

    def __init__(self, context: Context, previous: Any) -> None:
        super().__init__(previous)
        self.context = context

    def own_key(self) -> tuple[str, ...]:
        context = self.context
        limit = str(context.budget and context.budget.key)
        state = context.tag, context.attention, autocast_state()
        return "qfuse", source_digest(), context.resolved.fingerprint(), limit, *state


class JointPasses(_Passes, CustomGraphPass):
    """Run the joint stage on forward and backward in one graph, or on an inference graph."""

    def __call__(self, graph: fx.Graph) -> None:
        run_stage("joint", graph, self.context)
        self.run_previous(graph)


class LoweredPasses(_Passes, CustomGraphPass):
    """Run the lowered stage on each graph that Inductor lowers, behind its own passes."""

    def own_key(self) -> tuple[str, ...]:
        # What the pass writes depends on the CPU.
        return *super().own_key(), *map(str, wide.slow_dtypes())

    def __call__(self, graph: fx.Graph) -> None:
        self.run_previous(graph)
        run_stage(LOWERED, graph, self.context)
        if self.context.changed is not None:
            self.context.changed()


def behind(context: Context, previous: Any) -> Any:
    """Return a value for `post_grad_custom_post_pass`: what it holds, and our passes behind that.

    torch from 2.13 on takes a list there, and knows which passes want to know of inference.
    """
    if previous is None or not hasattr(custom_graph_pass, "CustomInferenceAwareGraphPass"):
        return LoweredPasses(context, previous)
    return [*_listed(previous), LoweredPasses(context, None)]


class Partitioner(_Passes, CustomPartitionerFn):
    """Run the partition stage: tag what must not be saved, then partition as functorch does; then
    the backward stage, on the graph that backward got, and the partitioned stage, on both."""

    def __call__(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        *,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.context.note_static(static_lifetime_input_indices or ())
        run_stage("partition", gm.graph, self.context)
        kwargs["static_lifetime_input_indices"] = static_lifetime_input_indices
        forward, backward = self._planned(gm, joint_inputs, **kwargs)
        run_stage("backward", backward.graph, self.context)
        for part in (forward, backward):
            run_stage(PARTITIONED, part.graph, self.context)
            part.recompile()
        return forward, backward

    def _planned(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partition within the budget, if there is one."""
        report, users = self.context.report, self.previous
        while isinstance(users, Hook):  # of `qfuse explain`
            users = users.previous
        if self.context.budget is not None and users is not None:
            warn_once("qfuse.memory has no effect: custom_partitioner_fn is the user's own")
        if users is not None:
            return self.partition(gm, joint_inputs, **kwargs)

        def partition(joint: fx.GraphModule) -> Pair:
            return partition_seedless(lambda it: self.partition(it, joint_inputs, **kwargs), joint)

        if self.context.budget is None or is_nested(gm.graph):
            return partition(gm)
        pair, report.memory = plan(partition, gm, self.context)
        if not report.memory.fits:
            log.warning("qfuse.memory: %s", report.memory)
        return pair


__all__ = [
    "Hook",
    "JointPasses",
    "LoweredPasses",
    "Partitioner",
    "behind",
    "passes_off",
    "run_stage",
]
