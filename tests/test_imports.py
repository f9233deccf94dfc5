"""Imports point down: every import statement of the package, those inside functions as well."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.processes import ROOT

#: The rooms of the house from the roof to the floor. A room imports from those below it only, and
#: rooms of one line never from each other.
ROOMS = (
    ("__main__",),
    ("cli", "pytest_plugin"),
    ("commands",),
    ("tuning",),
    ("testing",),
    ("diagnostics",),
    ("__init__",),
    ("integrations",),
    ("process",),
    ("backend",),
    ("hooks",),
    ("cache", "options"),
    ("own_options",),
    ("seedless",),
    ("memory",),
    ("offload",),
    ("cost",),
    ("liveness",),
    ("passes", "lowerings"),
    ("context", "exclusions"),
    ("resolved", "graph_report", "frames"),
    ("verdict",),
    ("corrections",),
    ("records", "logits"),
    ("presets",),
    ("quantization", "shipped"),
    ("marks",),
    ("experts",),
    ("kbit",),
    ("asked",),
    ("loading",),
    ("capture",),
    ("ops",),
    ("kernels",),
    ("csrc", "decode"),
    ("formats",),
    ("kept",),
    (
        "comparison",
        "compiled_for",
        "exc",
        "files",
        "inductor_config",
        "late",
        "log",
        "modules",
        "version",
    ),
)
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
PLACES = {"inductor_q": "", "passes": "passes.", "lowerings": "lowerings.", "csrc": "csrc."}


def modules() -> dict[str, Path]:
    """Every module by its dotted name inside the package, a package by the name `x.__init__`."""
    found = {}
    for top, prefix in PLACES.items():
        for path in (ROOT / top).rglob("*.py"):
            if not any(parent.is_symlink() for parent in path.parents):
                name = ".".join(path.relative_to(ROOT / top).with_suffix("").parts)
                found[prefix + name] = path
    return found


MODULES = modules()


def module_of(dotted: str) -> str:
    """The module that holds the dotted name, which may be a module or something in one."""
    while dotted:
        for name in (dotted, f"{dotted}.__init__"):
            if name in MODULES:
                return name
        dotted = dotted.rpartition(".")[0]
    return "__init__"


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) for each import of the package's own, wherever in the file it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            if top == "inductor_q":
                yield node.lineno, module_of(rest)


def room(module: str) -> str:
    return module.partition(".")[0]


def test_every_module_has_a_room() -> None:
    assert {room(module) for module in MODULES} == set(LEVEL)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_room_imports_from_rooms_below_it(module: str) -> None:
    upward = [
        f"{MODULES[module].relative_to(ROOT)}:{line} imports {other}"
        for line, other in imports(MODULES[module])
        if room(other) != room(module) and LEVEL[room(other)] <= LEVEL[room(module)]
    ]
    assert not upward


def test_no_file_imports_itself_by_way_of_others() -> None:
    """A package's own `__init__` is left out: it lists what its modules define."""
    graph = {
        module: {other for _, other in imports(path) if not other.endswith("__init__")} - {module}
        for module, path in MODULES.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import inductor_q.passes.graph", "passes.graph"),
        ("from inductor_q import kernels", "kernels.__init__"),
        ("from inductor_q.kernels.calls import DENSE", "kernels.calls"),
        ("def f():\n    from inductor_q.backend import qfuse", "backend"),
        ("if TYPE_CHECKING:\n    from inductor_q import __version__", "__init__"),
    ],
)
def test_imports_of_every_form_are_seen(source: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert [other for _, other in imports(path)] == [expected]
