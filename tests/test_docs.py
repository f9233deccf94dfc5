"""What docs/ takes from the code is what the code says."""

from __future__ import annotations

import argparse
import importlib
import inspect
import pkgutil
import re

import pytest

from docs.generate import HERE, generated
from inductor_q import cli
from inductor_q.commands.presets import tables
from inductor_q.presets import MAPPINGS, PRESETS

#: Those with names for users.
PACKAGES = ("experts", "kbit", "ops", "diagnostics")


@pytest.mark.parametrize("name", ["reference.md", "cli.md", "explain.schema.json"])
def test_generated_file_is_current(name: str) -> None:
    path = HERE / name
    assert path.read_text(encoding="utf-8") == generated()[path], "stale: run make docs"


def test_every_entry_of_every_preset_is_listed_with_its_evidence() -> None:
    listed = {(t.title, *row[1:]) for t in tables() for row in t.rows}
    for preset in PRESETS.values():
        for kind in MAPPINGS:
            for name, entry in getattr(preset, kind).items():
                row = (name, str(entry.value), entry.evidence)
                assert {(preset.name, *row), ("generic", *row)} & listed, (preset.name, name)


def test_every_command_and_option_is_in_the_manual() -> None:
    page = (HERE / "cli.md").read_text(encoding="utf-8")
    [commands] = [a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction)]
    for name, parser in commands.choices.items():
        assert f"qfuse {name}" in page or f"`{name}`" in page, name
        options = {option for action in parser._actions for option in action.option_strings}
        for option in options - {"-h", "--help"}:
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", page), f"{name} {option}"


@pytest.mark.parametrize("package", ["inductor_q", *(f"inductor_q.{name}" for name in PACKAGES)])
def test_no_module_hides_a_public_name(package: str) -> None:
    """Importing `package.observe` would make it what `package.observe` is from then on."""
    module = importlib.import_module(package)
    modules = {name for _, name, _ in pkgutil.iter_modules(module.__path__)}
    for name in module.__all__:
        if name in modules:
            importlib.import_module(f"{package}.{name}")
        assert not inspect.ismodule(getattr(module, name)), name
