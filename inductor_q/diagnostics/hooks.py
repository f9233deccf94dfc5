"""Observe Inductor in the two places that can be configured: the joint graph and the partitioner.

What is configured there already is called as before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol
from uuid import uuid4

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn

from inductor_q.hooks import Hook


class Observer(Protocol):
    """Follow a compile; no method may raise or change a graph."""

    def compiling(self, compiler: Any, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        """A backend is about to compile one of Dynamo's graphs."""

    def compiled(self) -> None:
        """The backend has compiled the graph."""

    def joint(self, graph: fx.Graph) -> None:
        """Inductor is about to run its joint passes."""

    def partitioned(
        self, gm: fx.GraphModule, forward: fx.GraphModule, options: dict[str, Any]
    ) -> None:
        """`gm` was split; `options` are the partitioner's keywords."""


class _Observing(Hook):
    """Observe from a hook.

    Its key is new in each compile: a cached graph would skip the hooks, so under observation the
    caches miss, and what is stored under such a key is never hit.
    """

    def __init__(self, observer: Observer, previous: Any) -> None:
        super().__init__(previous)
        self.observer = observer
        self.key = uuid4().hex

    def own_key(self) -> tuple[str, ...]:
        return "qfuse-observe", self.key


class JointHook(_Observing, CustomGraphPass):
    def __call__(self, graph: fx.Graph) -> None:
        self.observer.joint(graph)
        self.run_previous(graph)


class PartitionHook(_Observing, CustomPartitionerFn):
    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = self.partition(gm, joint_inputs, **kwargs)
        self.observer.partitioned(gm, forward, kwargs)
        return forward, backward


@contextlib.contextmanager
def hooked(observer: Observer) -> Iterator[None]:
    """Report to `observer` what Inductor compiles inside the block.

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
