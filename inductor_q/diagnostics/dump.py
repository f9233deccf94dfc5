"""`--dump DIR`: graphs before and after each pass, generated code, bytecode, and an index."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import fx

from inductor_q.diagnostics.events import OUTPUT_CODE, TraceHandler

INDEX = "index.json"


@dataclass(frozen=True)
class Dumped:
    """One file of a dump: what it shows of which compile, and the pass for a graph."""

    file: str
    kind: str  # "graph", "code", "bytecode", "problem"
    compile_id: str = ""
    pass_name: str = ""
    moment: str = ""  # "before" or "after"


@contextlib.contextmanager
def dumping(folder: Path, handler: TraceHandler) -> Iterator[None]:
    """Write what happens inside the block under `folder`, and `index.json` at its end."""
    from inductor_q.passes import runner

    folder.mkdir(parents=True, exist_ok=True)
    dumped: list[Dumped] = []

    def listen(step: Any, graph: fx.Graph, moment: str) -> None:
        compile_id = current_id()
        name = f"{_safe(compile_id)}.{len(dumped):03d}.{step.name}.{moment}.py"
        (folder / name).write_text(_printed(graph))
        dumped.append(Dumped(name, "graph", compile_id, step.name, moment))

    runner.listeners.append(listen)
    try:
        yield
    finally:
        runner.listeners.remove(listen)
        for number, event in enumerate(handler.named(OUTPUT_CODE)):
            name = f"{_safe(event.compile_id)}.inductor.{number}.py"
            (folder / name).write_text(event.payload)
            dumped.append(Dumped(name, "code", event.compile_id))
        (folder / INDEX).write_text(json.dumps([asdict(d) for d in dumped], indent=1))


def current_id() -> str:
    from torch._guards import CompileContext

    return str(CompileContext.current_compile_id() or "")


def _safe(compile_id: str) -> str:
    return compile_id.replace("/", "_").replace("!", "a") or "none"


def _printed(graph: fx.Graph) -> str:
    return str(graph)
