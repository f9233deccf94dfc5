"""Observe where Dynamo hands a graph to its backend.

Only there is it known who compiles, and what Dynamo calls the graph's inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from inductor_q.late import after_import

if TYPE_CHECKING:
    from inductor_q.diagnostics.hooks import Observer


@contextlib.contextmanager
def observed_backends(observer: Callable[[], Observer]) -> Iterator[None]:
    """Put an observer around every call of a backend inside the block.

    `observer` makes one when the first graph is compiled, so nothing of torch is imported before
    the target does.
    """
    with contextlib.ExitStack() as stack:

        def install() -> None:
            stack.enter_context(_wrapped(observer))

        stack.enter_context(after_import("torch._dynamo.output_graph", install))
        yield


@contextlib.contextmanager
def _wrapped(observer: Callable[[], Observer]) -> Iterator[None]:
    from torch._dynamo.output_graph import OutputGraph

    call = OutputGraph.call_user_compiler

    def call_user_compiler(
        self: Any, gm: Any, example_inputs: list[Any], *args: Any, **kwargs: Any
    ) -> Any:
        from inductor_q.diagnostics.hooks import hooked

        one = observer()
        one.compiling(self.compiler_fn, gm, example_inputs)
        try:
            with hooked(one):
                return call(self, gm, example_inputs, *args, **kwargs)
        finally:
            one.compiled()

    OutputGraph.call_user_compiler = call_user_compiler  # type: ignore[method-assign]
    try:
        yield
    finally:
        OutputGraph.call_user_compiler = call  # type: ignore[method-assign]
