"""Results say which source they come from, and what they say is so."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import origin, place, plots
from benchmarks.origin import BEFORE_DIGESTS, MissingOrigin

RESULTS = Path(origin.__file__).parent / "results"
FILES = sorted(RESULTS.glob("*.json"))
TREE = {
    "inductor_q/backend.py": "one\n",
    "inductor_q/diagnostics/render/templates/page.html": "two\n",
    "passes/fold.py": "three\n",
    "csrc/kernel.cu": "four\n",
    "benchmarks/bench.py": "five\n",
    "README.md": "six\n",
    "benchmarks/results/x.json": "{}\n",
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree as this one, with nothing in its files; it has no history."""
    root = tmp_path / "tree"
    for name, text in TREE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "inductor_q" / "passes").symlink_to("../passes")
    monkeypatch.setattr(origin, "ROOT", root)
    monkeypatch.delenv("BENCHMARK_COMMIT", raising=False)
    return root


@pytest.fixture
def history(tree: Path) -> Callable[..., str]:
    """The same tree under git, with one commit."""

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
        command = ["git", "-C", str(tree), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "all")
    return git


# --- the committed results --------------------------------------------------------------


def test_every_result_says_where_it_comes_from() -> None:
    assert FILES
    for path in FILES:
        origin.read(path)


def test_results_without_a_digest_become_fewer() -> None:
    """None is younger than the digests are, so none can join the list."""
    results = {path.name: json.loads(path.read_text()) for path in FILES}
    without = {name for name, result in results.items() if not result["commit"].get("source")}
    assert without == BEFORE_DIGESTS, "measured again or gone: take it off the list"
    assert all(results[name]["created"] < "2026-11-22T09" for name in without)


@pytest.fixture(scope="module")
def whole_history() -> None:
    if origin._git("rev-parse", "--is-shallow-repository") != b"false\n":
        pytest.skip("there is no history here to compare with")


@pytest.mark.usefixtures("whole_history")
def test_results_are_those_of_their_commit() -> None:
    for path in FILES:
        result = origin.read(path)
        if path.name in BEFORE_DIGESTS:
            continue
        id, source = result["commit"]["id"], result["commit"]["source"]
        assert result["commit"]["dirty"] is not None, f"python -m benchmarks origin {path}"
        assert result["commit"]["dirty"] is origin.differs(id, source), path.name


@pytest.mark.usefixtures("whole_history")
def test_each_commit_holds_the_script_that_wrote_the_result() -> None:
    for path in FILES:
        result = origin.read(path)
        script = result.get("example") or f"benchmarks.{result['benchmark']}"
        files = origin.commit_files(result["commit"]["id"])
        assert files is not None, f"{path.name}: no commit {result['commit']['id']}"
        words = script.replace(".", "/").split("_")  # behind the script's name comes a recipe's
        assert any(f"{'_'.join(words[:n])}.py" in dict(files) for n in range(1, 9)), path.name


def test_pictures_show_the_results_beside_them() -> None:
    pictures = sorted(RESULTS.glob("*.png"))
    assert pictures
    for picture in pictures:
        result = origin.read(picture.with_suffix(".json"))
        shown = plots.shown_in(picture.read_bytes())
        assert shown == plots.fingerprint(result), f"python -m benchmarks plot {picture.name}"


# --- the digest ---------------------------------------------------------------------------


def test_digest_is_of_what_a_number_depends_on(tree: Path) -> None:
    found = dict(origin.tree_files(tree))
    assert set(found) == set(TREE) - {"README.md", "benchmarks/results/x.json"}
    before = origin.digest(found.items())
    assert before == origin.digest(reversed(found.items())), "in any order"
    (tree / "README.md").write_text("more\n")
    (tree / "benchmarks" / "results" / "x.json").write_text("[]")
    (tree / "passes" / "__pycache__").mkdir()
    (tree / "passes" / "__pycache__" / "fold.cpython-311.pyc").write_bytes(b"x")
    assert origin.digest(origin.tree_files(tree)) == before
    for name in found:
        text = (tree / name).read_text()
        (tree / name).write_text(text + "more\n")
        assert origin.digest(origin.tree_files(tree)) != before, name
        (tree / name).write_text(text)
    (tree / "csrc" / "kernel.cu").rename(tree / "csrc" / "other.cu")
    assert origin.digest(origin.tree_files(tree)) != before, "a name counts"


def test_this_tree_has_sources_of_each_kind() -> None:
    names = {name for name, _ in origin.tree_files(place.ROOT)}
    for name in ("inductor_q/backend.py", "csrc/kbit.cu", "benchmarks/origin.py"):
        assert name in names
    assert any(name.startswith("passes/") for name in names)
    assert not any(name.startswith("inductor_q/passes/") for name in names)


# --- commit, write, read --------------------------------------------------------------------


def test_commit_of_a_clean_tree(tree: Path, history: Callable[..., str]) -> None:
    found = origin.commit()
    assert found == {
        "id": history("rev-parse", "HEAD"),
        "source": origin.digest(origin.tree_files(tree)),
        "dirty": False,
    }
    (tree / "README.md").write_text("no number depends on this\n")
    assert origin.commit() == found


@pytest.mark.parametrize("change", ["edited", "untracked"])
def test_commit_of_a_changed_tree(tree: Path, history: Callable[..., str], change: str) -> None:
    name = {"edited": "backend.py", "untracked": "new.py"}[change]
    (tree / "inductor_q" / name).write_text("changed\n")
    assert origin.commit()["dirty"] is True


def test_a_tree_inside_of_another_history_is_not_of_it(
    tree: Path, history: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin, "ROOT", tree / "inductor_q")
    assert origin.commit()["id"] is None


def test_commit_without_a_history(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = origin.digest(origin.tree_files(tree))
    assert origin.commit() == {"id": None, "source": source, "dirty": None}
    monkeypatch.setenv("BENCHMARK_COMMIT", "def9296")
    assert origin.commit() == {"id": "def9296", "source": source, "dirty": None}
    monkeypatch.setenv("BENCHMARK_COMMIT", "main")
    with pytest.raises(MissingOrigin, match="'main' is not the hash of a commit"):
        origin.commit()


@pytest.mark.parametrize("missing", ["commit", "id", "source"])
def test_what_comes_from_nowhere_is_neither_written_nor_read(tmp_path: Path, missing: str) -> None:
    result: dict[str, Any] = {"commit": {"id": "def9296", "source": "0" * 64, "dirty": None}}
    path = origin.write(result, tmp_path / "good.json")
    assert origin.read(path) == result
    (result if missing == "commit" else result["commit"]).pop(missing)
    bad = tmp_path / "bad.json"
    with pytest.raises(MissingOrigin, match=r"bad\.json has no"):
        origin.write(result, bad)
    bad.write_text(json.dumps(result))
    with pytest.raises(MissingOrigin, match=r"bad\.json has no"):
        origin.read(bad)
    assert plots.main([str(bad)]) == 1
    assert not bad.with_suffix(".png").exists()


# --- brought home ---------------------------------------------------------------------------


@pytest.mark.parametrize("changed", [False, True])
def test_a_result_that_comes_home_is_compared_with_its_commit(
    tree: Path,
    history: Callable[..., str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changed: bool,
) -> None:
    head = history("rev-parse", "HEAD")
    if changed:
        (tree / "passes" / "fold.py").write_text("changed where it ran\n")
    ran = origin.digest(origin.tree_files(tree))
    history("checkout", "--quiet", "--", ".")
    away = {"commit": {"id": head[:8], "source": ran, "dirty": None}, "rows": []}
    path = origin.write(away, tmp_path / "x.json")
    assert origin.main([str(path)]) == 0
    assert origin.read(path)["commit"] == {"id": head, "source": ran, "dirty": changed}
    words = "with changes that are not in the commit" if changed else "exactly that commit"
    assert capsys.readouterr().out == f"x.json: {head[:10]}, {words}\n"


@pytest.mark.parametrize("is_its_source", [True, False])
def test_a_result_is_given_the_commit_whose_source_it_names(
    tree: Path, history: Callable[..., str], tmp_path: Path, is_its_source: bool
) -> None:
    head = history("rev-parse", "HEAD")
    ran = origin.digest(origin.tree_files(tree)) if is_its_source else "0" * 64
    away = {"commit": {"id": "0123456", "source": ran, "dirty": True}, "rows": []}
    path = origin.write(away, tmp_path / "x.json")
    assert origin.main(["--commit", head[:9], str(path)]) == (0 if is_its_source else 1)
    expected = {"id": head, "source": ran, "dirty": False}
    assert origin.read(path)["commit"] == (expected if is_its_source else away["commit"])


def test_a_result_of_an_unknown_commit_stays_as_it_is(
    tree: Path, history: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    away = {"commit": {"id": "0123456", "source": "0" * 64, "dirty": None}}
    path = origin.write(away, tmp_path / "x.json")
    assert origin.main([str(path)]) == 1
    assert "no commit 0123456 in this history" in capsys.readouterr().out
    assert origin.read(path) == away
