"""`qfuse passes` lists the pipeline, in order."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from inductor_q.commands import listing

if TYPE_CHECKING:
    from inductor_q.commands import Subparsers


def register(subparsers: Subparsers) -> None:
    listing.add_parser(
        subparsers, "passes", main, "the passes of the backend, in the order they run"
    )


def main(args: argparse.Namespace) -> int:
    return listing.show(tables(), args)


def tables() -> list[listing.Table]:
    """Tabulate name, stage and the first line of the file that holds the pass.

    All are read from the source: to import a pass takes the seconds that torch takes.
    """
    spec = find_spec("inductor_q.passes")
    assert spec is not None and spec.origin is not None
    classes: dict[str, ast.ClassDef] = {}
    about: dict[str, str] = {}
    constants: dict[str, ast.expr] = {}
    for path in Path(spec.origin).parent.glob("*.py"):
        tree = ast.parse(path.read_bytes())
        constants |= _assigned(tree.body)
        for found in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            classes[found.name] = found
            about[found.name] = (ast.get_docstring(tree) or "").partition("\n")[0]

    def value(name: str, key: str) -> str:
        """Return what the class or the nearest of its bases sets `key` to."""
        own = _assigned(classes[name].body)
        if key not in own:
            return value(ast.unparse(classes[name].bases[0]), key)
        return str(ast.literal_eval(constants.get(ast.unparse(own[key]), own[key])))

    pipeline = constants["PIPELINE"]
    assert isinstance(pipeline, ast.Tuple)
    steps = [ast.unparse(call.func) for call in pipeline.elts if isinstance(call, ast.Call)]
    rows = [(value(step, "name"), value(step, "stage"), about[step]) for step in steps]
    return [listing.Table(("pass", "stage", "what it does"), rows)]


def _assigned(body: Sequence[ast.stmt]) -> dict[str, ast.expr]:
    """Return what each name is set to, with an annotation or without one."""
    found: dict[str, ast.expr] = {}
    for node in body:
        match node:
            case (
                ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                | ast.Assign(targets=[ast.Name(id=name)], value=value)
            ):
                found[name] = value
    return found
