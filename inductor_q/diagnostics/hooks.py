"""The two places where Inductor lets an observer look, by configuration: the joint graph and the
partitioner. What is configured there already is called as before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol
from uuid import uuid4

from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn

from inductor_q.hooks import previous_uuids


class Observer(Protocol):
    """What is told of a compile; none of it may raise or change a graph."""

    def compiling(self, compiler: Any, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        """A backend is about to compile a graph of Dynamo's."""

    def compiled(self) -> None:
        """It has."""

    def joint(self, graph: fx.Graph) -> None:
        """Inductor is about to run its joint passes."""

    def partitioned(
        self, gm: fx.GraphModule, forward: fx.GraphModule, options: dict[str, Any]
    ) -> None:
        """`gm` was split; `options` are the partitioner's keywords."""


class _Hook:
    """A hook of Inductor's configuration that observes and calls the previous one.

    Its key is new in each compile: a cached graph would skip the hooks, so under observation the
    caches miss, and what is stored under such a key is never hit.
    """

    def __init__(self, observer: Observer, previous: Any) -> None:
        self.observer = observer
        self.previous = previous
        self.key = uuid4().hex

    def uuid(self) -> Any:
        previous = previous_uuids(self.previous)
        return None if previous is None else ("qfuse-observe", self.key, *previous)

    def __getstate__(self) -> dict[str, Any]:
        return {"key": self.uuid()}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return self  # Inductor copies its configuration


class JointHook(_Hook, CustomGraphPass):
    def __call__(self, graph: fx.Graph) -> None:
        self.observer.joint(graph)
        hooks = self.previous if isinstance(self.previous, (list, tuple)) else [self.previous]
        for hook in hooks:
            if hook is not None:
                hook(graph)


class PartitionHook(_Hook, CustomPartitionerFn):
    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        partition: Callable[..., Any] = self.previous or min_cut_rematerialization_partition
        forward, backward = partition(gm, joint_inputs, **kwargs)
        self.observer.partitioned(gm, forward, kwargs)
        return forward, backward


@contextlib.contextmanager
def hooked(observer: Observer) -> Iterator[None]:
    """Tell `observer` of what Inductor compiles inside the block.

    Put around one call of a backend: the (lazily compiled) backward needs no hook, and what a
    target configures between two compiles is kept.
    """
    from torch._inductor import config

    hooks = {
        name: kind(observer, getattr(config, name))
        for name, kind in (
            ("joint_custom_pre_pass", JointHook),
            ("custom_partitioner_fn", PartitionHook),
        )
    }
    for name, hook in hooks.items():
        setattr(config, name, hook)
    try:
        yield
    finally:
        for name, hook in hooks.items():
            setattr(config, name, hook.previous)
