"""Count what Dynamo did, and compile from nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from inductor_q.diagnostics.events import TRACE, TraceHandler, listening


@dataclass
class CompileTrace:
    """Count what Dynamo did inside a ``with`` block, as torch's own structured trace has it.

    The trace sees breaks that ``torch._dynamo.utils.counters`` misses (frames skipped inside
    loops, data-dependent branches). It slows compilation down: never time a compile under it.
    """

    _WANTED: ClassVar = frozenset({"dynamo_graph_break_reason", "recompile_reasons"})

    graphs: int = 0
    handler: TraceHandler = field(default_factory=lambda: TraceHandler(CompileTrace._WANTED))

    @property
    def breaks(self) -> list[str]:
        return [event.payload for event in self.handler.named("dynamo_graph_break_reason")]

    @property
    def recompiles(self) -> list[str]:
        return [event.payload for event in self.handler.named("recompile_reasons")]

    def __enter__(self) -> CompileTrace:
        self._listening = listening(TRACE, self.handler)
        self._before = self._unique_graphs()
        self._listening.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._listening.__exit__(None, None, None)
        self.graphs = self._unique_graphs() - self._before

    @staticmethod
    def _unique_graphs() -> int:
        from torch._dynamo.utils import counters

        return counters["stats"]["unique_graphs"]


@contextlib.contextmanager
def fresh_cache() -> Iterator[None]:
    """Compile from nothing inside the block: Inductor's and AOTAutograd's caches are empty."""
    from torch._inductor.utils import fresh_cache as inductor_fresh_cache

    with inductor_fresh_cache():
        yield
