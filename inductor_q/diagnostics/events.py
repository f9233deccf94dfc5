"""Read torch's structured trace in process: what TORCH_TRACE would write, without files.

The trace is the one source that sees every graph break and recompile: counters miss breaks inside
loops and `try`, and `torch._dynamo.explain` keeps a few reasons of many. Torch builds a payload as
soon as anybody listens, so listening costs a little compile time; nothing is parsed before the run
is over.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

#: The logger that torch gives its structured trace to.
TRACE = "torch.__trace"

#: The events that a report is made of; the others (graphs, guards, bytecode) are dropped at once.
WANTED = frozenset(
    {
        "dynamo_start",
        "dynamo_graph_break_reason",
        "dynamo_error",
        "recompile_reasons",
        "compilation_metrics",
        "bwd_compilation_metrics",
        "chromium_event",
        "fx_graph_cache_hit",
        "aotautograd_cache_hit",
        "qfuse_report",
    }
)

#: The events that `--dump` needs besides.
OUTPUT_CODE = "inductor_output_code"

_CONTEXT = frozenset(
    {
        "rank",
        "frame_id",
        "frame_compile_id",
        "compiled_autograd_id",
        "attempt",
        "has_payload",
        "stack",
        "subgraph_name",
    }
)


@contextlib.contextmanager
def listening(name: str, handler: logging.Handler) -> Iterator[None]:
    """Attach a handler to a logger, which need not have been made yet."""
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@dataclass(frozen=True)
class Event:
    """Hold one record of the trace: an artifact under its own name, anything else under its key.

    `data` is the metadata that torch gave with it, `payload` the text, `note` what a listener saw
    when the event was emitted.
    """

    name: str
    compile_id: str = ""
    attempt: int = 0
    data: Any = None
    payload: str = ""
    note: Any = None


@dataclass(eq=False)
class TraceHandler(logging.Handler):
    """Keep the wanted events of the structured trace, in order.

    `notes` maps an event's name to a function that is called while torch emits it, for what is
    gone afterwards (a frame's locals); its result becomes the event's `note`.
    """

    wanted: frozenset[str] = WANTED
    notes: dict[str, Callable[[], Any]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(logging.DEBUG)

    def emit(self, record: logging.LogRecord) -> None:
        metadata: dict[str, Any] = getattr(record, "metadata", None) or {}
        name, data = _name(metadata)
        if name not in self.wanted:
            return
        note = self.notes[name]() if name in self.notes else None
        payload = getattr(record, "payload", None) or ""
        attempt = metadata.get("attempt", 0)
        self.events.append(Event(name, compile_id(metadata), attempt, data, payload, note))

    def named(self, *names: str) -> Iterator[Event]:
        """Return the events of these names."""
        return (event for event in self.events if event.name in names)


def compile_id(metadata: dict[str, Any]) -> str:
    """Return torch's text for a compile: "3/1" is frame 3, compiled for the second time."""
    autograd, frame = metadata.get("compiled_autograd_id"), metadata.get("frame_id")
    parts = [] if autograd is None else [f"!{autograd}"]
    if frame is not None:
        parts.append(f"{frame}/{metadata.get('frame_compile_id', 0)}")
    return "/".join(parts)


def _name(metadata: dict[str, Any]) -> tuple[str, Any]:
    for key, value in metadata.items():
        if key not in _CONTEXT:
            return (value["name"], value) if key == "artifact" else (key, value)
    return "", None


def interned(number: int) -> str:
    """Return the file name behind a number in a trace's stack."""
    from torch._logging.structured import INTERN_TABLE

    return next((name for name, index in INTERN_TABLE.items() if index == number), "")
