"""Record where a result comes from: a commit, a digest of the source, whether the two agree.

A tree may run on a machine that has no history. The digest is taken there, over the files that a
number depends on; ``BENCHMARK_COMMIT`` names the commit. Once the result lies where the history
is, ``python -m benchmarks origin FILE...`` compares the digest with that of the commit and writes
``dirty`` into the file: true where the source that ran was not the commit's.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from benchmarks.place import ROOT

#: Every file of the first folders counts, and only the Python files of the others.
WHOLE = ("inductor_q", "passes", "lowerings", "csrc")
SCRIPTS = ("benchmarks", "examples")

#: Results that were recorded before there were digests: they have a commit, and nobody can say
#: whether its source is what ran. A result that is measured again leaves this set; none joins it.
BEFORE_DIGESTS = frozenset(
    {
        "attention-h200.json",
        "dequantize-cpu.json",
        "experts-h200.json",
        "explain-cpu.json",
        "kbit-quality-cpu.json",
        "kbit-quality-h200.json",
        "launch-h200.json",
        "linear-cpu.json",
        "linear-h200.json",
        "moe-h200.json",
        "moe_ep-h200.json",
        "moe_providers-h200.json",
        "moe_qlora-gpt-oss-20b-h200.json",
        "moe_qlora-qwen3-30b-a3b-busy-h200.json",
        "moe_ranks-h200.json",
        "recipe-300-h200.json",
        "step-8b-h200.json",
        "step-cpu.json",
        "step-repeat-cpu.json",
        "thresholds-cpu.json",
        "thresholds-h200.json",
    }
)


class MissingOrigin(ValueError):
    """Raised where a result does not say which source it comes from."""


def commit() -> dict[str, Any]:
    """Return the commit that runs, the digest of its source here, and whether the two differ."""
    name = os.environ.get("BENCHMARK_COMMIT")  # before git: a tree may travel with an older history
    if name is None and (found := _git("rev-parse", "HEAD")) is not None:
        name = found.decode().strip()
    if name is not None and not re.fullmatch(r"[0-9a-f]{7,40}", name):
        raise MissingOrigin(f"BENCHMARK_COMMIT={name!r} is not the hash of a commit")
    source = digest(tree_files(ROOT))
    return {"id": name, "source": source, "dirty": differs(name, source)}


def require(commit: Any, what: str) -> None:
    """Raise MissingOrigin unless ``commit`` has an id and a digest."""
    for key, way_out in (("id", "set BENCHMARK_COMMIT where there is no git"), ("source", "")):
        if not (isinstance(commit, dict) and commit.get(key)):
            hint = f": {way_out}" if way_out else ""
            raise MissingOrigin(f"{what} has no {key} of the commit it comes from{hint}")


def read(path: Path) -> dict[str, Any]:
    """Return the result in a file; raise MissingOrigin where it has no origin."""
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    found = result.get("commit")
    if path.name in BEFORE_DIGESTS and isinstance(found, dict) and found.get("id"):
        return result
    require(found, path.name)
    return result


def write(result: dict[str, Any], path: Path) -> Path:
    """Save a result; raise MissingOrigin where it does not say where it comes from."""
    require(result.get("commit"), path.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def state(result: dict[str, Any]) -> str:
    """Say in a few words what is known about the source of a result."""
    found = result["commit"]
    if not found.get("source"):
        return "recorded before digests"
    if found["dirty"] is None:
        return "not compared with its commit yet"
    return "with changes that are not in the commit" if found["dirty"] else "exactly that commit"


# --- the digest -----------------------------------------------------------------------


def is_source(name: str) -> bool:
    """Return whether a number depends on this file of the tree."""
    path = PurePosixPath(name)
    top, rest = path.parts[0], path.parts[1:]
    if top in SCRIPTS:
        return len(rest) == 1 and path.suffix == ".py"
    # The links of inductor_q/ lead to folders that are counted under their own name.
    linked = top == "inductor_q" and bool(rest) and rest[0] in WHOLE
    bytecode = "__pycache__" in rest or path.suffix in (".pyc", ".pyo")
    return top in WHOLE and bool(rest) and not linked and not bytecode


def digest(files: Iterable[tuple[str, bytes]]) -> str:
    """Make one digest over names and contents, in whatever order the files come."""
    lines = sorted(f"{hashlib.sha256(content).hexdigest()} {name}\n" for name, content in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def tree_files(root: Path) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the source files of a tree."""
    for top in (*WHOLE, *SCRIPTS):
        for folder, _, names in os.walk(root / top):
            for file in (Path(folder, name) for name in names):
                name = file.relative_to(root).as_posix()
                if is_source(name):
                    yield name, file.read_bytes()


def commit_files(name: str) -> list[tuple[str, bytes]] | None:
    """Return names and contents of a commit's source files; None where it is not to be had."""
    archive = _git("archive", "--format=tar", name)
    if archive is None:
        return None
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = [(m.name, tar.extractfile(m)) for m in tar if m.isreg() and is_source(m.name)]
        return [(name, file.read()) for name, file in files if file is not None]


def differs(name: str | None, source: str) -> bool | None:
    """Return whether the source that ran is not the commit's; None where nobody can say."""
    files = None if name is None else commit_files(name)
    return None if files is None else digest(files) != source


def _git(*arguments: str) -> bytes | None:
    """Return what git prints; None where this tree has no history of its own."""
    try:
        top = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "--show-toplevel"],
            capture_output=True,
            text=True,
            check=True,
        )
        if Path(top.stdout.strip()).resolve() != ROOT:
            return None  # an outer repository, of which this tree is a copy or an install
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


# --- python -m benchmarks origin --------------------------------------------------------


def settle(path: Path, commit: str | None = None) -> str:
    """Compare a file's digest with its commit, write the answer into the file, and return it.

    With `commit`, that one is written in place of the file's, if its source has the file's digest.
    """
    result = read(path)
    require(result["commit"], path.name)
    wanted = commit or result["commit"]["id"]
    name = _git("rev-parse", "--verify", f"{wanted}^{{commit}}")
    if name is None:
        raise MissingOrigin(f"{path.name}: no commit {wanted} in this history")
    full = name.decode().strip()
    source = result["commit"]["source"]
    if commit and differs(full, source):
        raise MissingOrigin(f"{path.name}: what ran was not the source of {full[:10]}")
    result["commit"] = {"id": full, "source": source, "dirty": differs(full, source)}
    write(result, path)
    return f"{path.name}: {full[:10]}, {state(result)}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks origin", description=settle.__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--commit", help="the commit that ran, where the file names another")
    arguments = parser.parse_args(argv)
    try:
        for path in arguments.files:
            print(settle(path, arguments.commit))
    except MissingOrigin as error:
        print(error)
        return 1
    return 0
