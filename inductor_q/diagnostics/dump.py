"""Write for `--dump DIR` graphs before and after each pass, generated code, bytecode, and an index.

depyf decompiles what Dynamo made of a function's bytecode. It cannot follow every frame (0.20 fails
on those with a graph break on Python 3.11): then the bytecode is disassembled, and the file says
why.
"""

from __future__ import annotations

import contextlib
import dis
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from torch import fx

from inductor_q.diagnostics.breaks import function_name
from inductor_q.diagnostics.events import OUTPUT_CODE, TraceHandler

INDEX = "index.json"


@dataclass(frozen=True)
class Dumped:
    """Describe one file of a dump by its compile, and a graph also by its pass and side."""

    file: str
    kind: str  # "graph", "code" or "bytecode"
    compile_id: str = ""
    pass_name: str = ""
    moment: str = ""  # "before" or "after"


@contextlib.contextmanager
def dumping(folder: Path, handler: TraceHandler) -> Iterator[None]:
    """Write what happens inside the block under `folder`, and `index.json` at its end."""
    from torch._dynamo.convert_frame import register_bytecode_hook

    from inductor_q.passes import runner

    folder.mkdir(parents=True, exist_ok=True)
    _clear(folder)
    dump = _Dump(folder)
    runner.listeners.append(dump.graph)
    bytecode = register_bytecode_hook(dump.bytecode)
    try:
        yield
    finally:
        bytecode.remove()
        runner.listeners.remove(dump.graph)
        for event in handler.named(OUTPUT_CODE):
            dump.write("inductor.py", event.payload, "code", event.compile_id)
        dump.decompile()
        listed = json.dumps([asdict(one) for one in dump.files], indent=1)
        (folder / INDEX).write_text(listed)


def _clear(folder: Path) -> None:
    """Remove the files of an earlier dump, so that none is taken for one of this run."""
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        for item in json.loads((folder / INDEX).read_text()):
            (folder / Path(item["file"]).name).unlink(missing_ok=True)


@dataclass
class _Dump:
    folder: Path
    files: list[Dumped] = field(default_factory=list)
    codes: list[tuple[str, CodeType, CodeType]] = field(default_factory=list)

    def write(self, name: str, text: str, kind: str, compile_id: str, *about: str) -> None:
        place = compile_id.replace("/", "_").replace("!", "a") or "none"
        file = f"{place}.{len(self.files):03d}.{name}"
        (self.folder / file).write_text(text, encoding="utf-8")
        self.files.append(Dumped(file, kind, compile_id, *about))

    def graph(self, step: Any, graph: fx.Graph, moment: str) -> None:
        """Write a graph; the runner calls this before and after each pass."""
        text = "\n".join(_line(node) for node in graph.nodes) + "\n"
        self.write(f"{step.name}.{moment}.txt", text, "graph", _current_id(), step.name, moment)

    def bytecode(self, code: CodeType, new_code: CodeType) -> None:
        """Keep a function that Dynamo has compiled, to decompile it when the run is over."""
        self.codes.append((_current_id(), code, new_code))

    def decompile(self) -> None:
        for compile_id, original, compiled in self.codes:
            name = "".join(c for c in function_name(original.co_name) if c.isidentifier()) or "code"
            text = _decompiled(original, "as Dynamo read it") + _decompiled(
                compiled, "as Dynamo left it"
            )
            self.write(f"{name}.bytecode.py", text, "bytecode", compile_id)


def _line(node: fx.Node) -> str:
    """Print a node with the shape and dtype of its value."""
    value: Any = node.meta.get("val", node.meta.get("example_value"))
    shape = getattr(value, "shape", None)
    kind = "" if shape is None else f"  # {str(value.dtype).removeprefix('torch.')}{[*shape]}"
    return f"{node.format_node() or node}{kind}"


def _decompiled(code: CodeType, what: str) -> str:
    """Decompile a code object with depyf, or disassemble it and give the reason."""
    head = f"# {code.co_name}, {what}\n"
    try:
        import depyf
    except ModuleNotFoundError:
        reason = "depyf is not installed: pip install 'inductor-q[depyf]'"
    else:
        decompile: Callable[[CodeType], str] = depyf.decompile
        try:
            return f"{head}{decompile(code)}\n"
        except Exception as error:  # depyf raises whatever its interpreter runs into
            lines = str(error).strip().splitlines()
            reason = f"depyf {_version()} cannot decompile this: {lines[0] if lines else error!r}"
    listing = dis.Bytecode(code).dis()
    return f"{head}# {reason}\n" + "".join(f"# {line}\n" for line in listing.splitlines())


def _version() -> str:
    from importlib.metadata import version

    return version("depyf")


def _current_id() -> str:
    from torch._guards import CompileContext

    return str(CompileContext.current_compile_id() or "")
