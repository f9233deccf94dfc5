"""Only `capture/` decides by a library's names: everything else asks the list of libraries."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.processes import ROOT

#: Packages, classes and ops of libraries, in an identifier or a text.
NAMES = re.compile(
    r"bitsandbytes|bnb|torchao|params4bit|int8params|linear[48]bit|\b(gemm|gemv|dequantize)_4bit",
    re.IGNORECASE,
)

#: Where they stand outside of `capture/`, and why that decides nothing about a graph or a weight.
ALLOWED = {
    "inductor_q/commands/cache.py": "packages whose versions say whether a cache fits",
    "inductor_q/exc/compiling.py": "a text that names who has packed a weight",
    "inductor_q/integrations/checkpointing.py": "knows a layer whose forward writes to itself",
    "inductor_q/integrations/cpu_packing.py": "undoes what that library does to a module",
    "inductor_q/integrations/first_call.py": "does what that library's layers do once",
    "inductor_q/integrations/dora.py": "decodes a module's weight as that library's layer does",
    "inductor_q/experts/packing.py": "a text that says what a library does not pack",
    "inductor_q/loading/files.py": "the way out of a method, by config.json",
    "inductor_q/loading/readers/__init__.py": "methods that need no reader, by config.json",
    "inductor_q/asked.py": "what users say to ask for a library's formats",
    "inductor_q/marks.py": "marks that libraries' users look for",
    "inductor_q/quantization.py": "what a library is asked to write, in its own terms",
    "inductor_q/testing/__init__.py": "what tests and benchmarks make models with",
    "inductor_q/testing/extras.py": "imports what models are made with",
    "inductor_q/testing/references.py": "decodes what the model's library has quantized",
    "inductor_q/testing/models.py": "makes the model that tests and benchmarks run",
    "inductor_q/formats": "the family of formats that bitsandbytes has",
    "inductor_q/diagnostics/checks": "the doctor looks for known mistakes with a library",
    "inductor_q/diagnostics/fixes.py": "advice, by the file in which a graph breaks",
    "inductor_q/diagnostics/recompiles.py": "advice",
    "inductor_q/diagnostics/observation.py": "packages whose versions are reported",
    "inductor_q/presets": "evidence of what was measured",
}


def spelled(path: Path) -> Iterator[str]:
    """The identifiers and texts of a source file, without its docstrings."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in docstrings:
            continue
        for field in ("id", "attr", "arg", "name", "asname", "module", "value"):
            if isinstance(text := getattr(node, field, None), str):
                yield text


def named() -> dict[str, list[str]]:
    """What is spelled with a library's name, by file."""
    found: dict[str, list[str]] = {}
    for top in ("inductor_q", "passes", "lowerings", "csrc"):
        for path in sorted((ROOT / top).rglob("*.py")):
            file = path.relative_to(ROOT)
            if file.is_relative_to("inductor_q/capture") or any(
                p.is_symlink() for p in path.parents
            ):
                continue
            for text in filter(NAMES.search, spelled(path)):
                found.setdefault(str(file), []).append(text)
    return found


def allowing(file: str) -> str | None:
    return next((place for place in ALLOWED if Path(file).is_relative_to(place)), None)


def test_only_capture_decides_by_the_names_of_libraries() -> None:
    assert not {file: texts for file, texts in named().items() if allowing(file) is None}


def test_what_is_allowed_is_there() -> None:
    assert {allowing(file) for file in named()} == {*ALLOWED}
