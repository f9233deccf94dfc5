"""No test is without a check: each holds an assertion, or calls what does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import ROOT

Function = ast.FunctionDef | ast.AsyncFunctionDef

#: Calls of libraries that fail by themselves.
CHECKS = {"raises", "warns", "fail", "assert_close", "assert_expected_inline", "opcheck"}


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def called(function: Function) -> set[str]:
    """The names of what a function calls, methods without their object."""
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    names = {call.id for call in calls if isinstance(call, ast.Name)}
    return names | {call.attr for call in calls if isinstance(call, ast.Attribute)}


def holds_an_assertion(function: Function) -> bool:
    return any(isinstance(node, ast.Assert) for node in ast.walk(function))


def without_a_check(files: list[Path]) -> list[str]:
    """`file::test` of each test from which no assertion is reached by calls, followed by name."""
    trees = {file: ast.parse(file.read_text()) for file in files}
    found = [(file, function) for file, tree in trees.items() for function in functions(tree)]
    checks = CHECKS | {f.name for _, f in found if holds_an_assertion(f)}
    while more := {f.name for _, f in found if called(f) & checks} - checks:
        checks |= more
    return [
        f"{file.name}::{function.name}"
        for file, function in found
        if file.name.startswith("test_") and function.name.startswith("test_")
        if not holds_an_assertion(function) and not called(function) & checks
    ]


def test_every_test_can_fail() -> None:
    assert without_a_check(sorted((ROOT / "tests").rglob("*.py"))) == []


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("def test_a(): print(1)", ["test_it.py::test_a"]),
        ("def test_a(): assert 1", []),
        ("def test_a(): helper()\ndef helper(): deeper()\ndef deeper(): assert 1", []),
        ("def test_a(): helper()\ndef helper(): print(1)", ["test_it.py::test_a"]),
        ("def test_a():\n    with pytest.raises(ValueError): int('x')", []),
    ],
)
def test_a_test_without_a_check_is_found(source: str, missing: list[str], tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(source)
    assert without_a_check([file]) == missing
