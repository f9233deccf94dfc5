"""Whose code a frame is, wherever packages were installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import fx

import inductor_q
from inductor_q.frames import library_of, user_frame

TARGET = ".site"  # no name that means anything: what counts is the dist-info inside


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A project with distributions in a folder of its own, as `pip install --target` does."""
    site = tmp_path / TARGET
    for distribution, top_level in (("Some-Dist", "declared\n"), ("other", "")):
        info = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\n")
        lines = (
            "listed/__init__.py,,",
            "module.py,,",
            "../bin/tool,,",
            '"a, b.py",,',
            "",
        )
        (info / "RECORD").write_text("\n".join(lines))
        if top_level:
            (info / "top_level.txt").write_text(top_level)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "library"),
    [
        (f"{TARGET}/declared/deep/inside.py", "Some-Dist"),
        (f"{TARGET}/listed/__init__.py", "other"),
        (f"{TARGET}/module.py", "other"),
        (f"{TARGET}/unknown/a.py", "unknown"),
        ("train.py", ""),
        ("package/train.py", ""),
    ],
)
def test_installed_is_what_lies_beside_a_dist_info(
    installed: Path, file: str, library: str
) -> None:
    assert library_of(str(installed / file)) == library


def test_the_libraries_of_this_process() -> None:
    assert library_of(pytest.__file__) == "pytest"
    assert library_of(torch.nn.__file__) == "torch"
    assert library_of(json.__file__) == "Python"
    assert library_of(str(inductor_q.__file__)) == "inductor-q"
    assert library_of(__file__) == ""


def test_peft_is_one() -> None:
    peft = pytest.importorskip("peft")
    assert library_of(peft.__file__) == "peft"


@pytest.mark.parametrize(
    ("file", "library"),
    [
        ("<frozen importlib._bootstrap>", "Python"),
        ("<eval_with_key>.3", "torch"),
        ("<string>", ""),
        ("<stdin>", ""),
    ],
)
def test_code_without_a_file(file: str, library: str) -> None:
    assert library_of(file) == library


def node_from(*frames: tuple[str, int]) -> fx.Node:
    node = fx.Graph().placeholder("x")
    node.meta["stack_trace"] = "\n".join(f'  File "{f}", line {n}, in forward' for f, n in frames)
    return node


def test_the_frame_shown_is_the_users_innermost(installed: Path) -> None:
    train, library = str(installed / "train.py"), str(installed / TARGET / "module.py")
    node = node_from((train, 3), (train, 7), (library, 11), (torch.nn.__file__, 13))
    assert user_frame(node) == f"{train}:7"
    assert user_frame(node_from((library, 11), (torch.nn.__file__, 13))).endswith(":13")
    assert user_frame(node_from()) == ""
