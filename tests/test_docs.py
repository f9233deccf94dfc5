"""What the documents take from code and results is what those say; their links lead somewhere."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import pkgutil
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from docs import api, figures, private, tune_figures
from docs.generate import BLOCK, HERE, PAGES, ROOT, VALUE, filled, generated
from inductor_q import cli, kbit
from inductor_q.commands.presets import tables
from inductor_q.presets import MAPPINGS, PRESETS
from inductor_q.tuning.runs import Run, Runs

#: Pages with links.
LINKING = (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md")

#: Those with names for users.
PACKAGES = ("experts", "kbit", "ops", "diagnostics")


@functools.cache
def current() -> dict[Path, str]:
    return generated()


@pytest.mark.parametrize("path", [*PAGES, HERE / "explain.schema.json"], ids=lambda path: path.name)
def test_generated_file_is_current(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == current()[path], "stale: run make docs"


def test_every_table_and_figure_is_shown_somewhere() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    assert {name for _, kind, name, _ in BLOCK.findall(text) if kind == "figures"} == set(
        figures.TABLES
    )
    assert {name for _, name, _ in VALUE.findall(text)} == set(figures.VALUES)


def test_a_table_of_what_tune_has_recorded(tmp_path: Path) -> None:
    key = {"device": "a GPU", "torch": "2.13.0", "model": "m:f", "steps": 5, "sources": "abc"}
    runs = Runs(tmp_path / "tune-x.jsonl", key)
    for name, number in (("base", 1), ("knob", 1), ("knob", 2), ("base", 2)):
        seconds = (0.01 if name == "base" else 0.005,) * 4
        runs.append(Run(condition=name, round=number, seconds=seconds, losses=(1.0, 0.9), peak=9))
    found = tune_figures.tune("tune-x", tmp_path)
    assert "| knob | 5.0 | 0.500 |  | 0.0 | 0 | 0.0e+00 | 50.0% faster, noise 1.0% |" in found
    assert "| stock |  |  |  |  |  |  | not measured: the budget ended |" in found
    assert found.endswith("model m:f, 5 steps a run, digest of qfuse's source abc.")


def test_a_stale_table_is_written_again() -> None:
    page = (
        "<!-- figures attention -->\n\nold\n\n<!-- end -->\na <!-- figure qlora.peak -->1<!-- / -->"
    )
    new = filled(page)
    assert figures.attention() in new and "old" not in new
    assert new.endswith(f"a <!-- figure qlora.peak -->{figures.VALUES['qlora.peak']()}<!-- / -->")
    assert filled(new) == new


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_line_begins_with_a_figure(path: Path) -> None:
    """Markdown takes such a line for HTML and leaves the rest of it as it is."""
    assert not re.search(r"^\s*<!-- figure ", path.read_text(encoding="utf-8"), re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", LINKING, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        page = (path.parent / file).resolve() if file else path
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), target


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_examples_are_python(path: Path) -> None:
    if path.name == "api.md":
        return  # signatures
    for example in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
        ast.parse(example)


def test_the_example_of_the_ops_runs() -> None:
    page = (HERE / "index.md").read_text(encoding="utf-8")
    [example] = [
        e for e in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "ops.linear" in e
    ]
    names: dict[str, Any] = {}
    exec(example, names)
    weight, x = names["weight"], names["x"]
    values = kbit.dequantize(weight)
    torch.testing.assert_close(names["y"], x @ values.t())
    torch.testing.assert_close(x.grad, values.sum(0).expand_as(x))


def test_a_public_name_without_a_docstring_is_refused() -> None:
    @dataclass
    class Bare:
        x: int

    with pytest.raises(api.Undocumented, match="Bare has no docstring"):
        api.entry("inductor_q.Bare", Bare)


def test_signature_and_sections() -> None:
    def sample(x: list[int], *, keep: bool = True) -> int:
        """Count.

        Args:
            x: what to count,
                over two lines.

        Raises:
            ValueError: never.
        """
        return len(x)

    assert api.entry("m.sample", sample) == (
        "### `m.sample`\n\n```python\nsample(x: list[int], *, keep: bool = True) -> int\n```\n\n"
        "Count.\n\nArguments:\n\n- `x`: what to count,\n  over two lines.\n\n"
        "Raises:\n\n- `ValueError`: never."
    )


def test_a_private_name_without_a_purpose_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "used", lambda: {"torch._new.name"})
    with pytest.raises(AssertionError, match=r"torch\._new\.name: say in docs/private\.py"):
        private.table()


def test_private_names_are_found() -> None:
    tree = ast.parse("import torch._a\nfrom torch.b._c import d\nx = torch._e.f(torch.nn.g)")
    assert set(filter(private.is_private, private.names(tree))) >= {
        "torch._a",
        "torch.b._c.d",
        "torch._e.f",
    }
    assert not private.is_private("torch.nn.g")
    found = private.used()
    assert {"torch._dynamo.output_graph.OutputGraph", "torch._grouped_mm"} <= found


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
