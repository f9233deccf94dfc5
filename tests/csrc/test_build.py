"""Building the C++ of csrc/: cached by content, and a failure is a reason."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from inductor_q import kept
from inductor_q.csrc import build
from inductor_q.log import warn_once
from tests.support.processes import environment

ANSWER = 'extern "C" int answer() { return 42; }\n'
Loader = Callable[[str], Any]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Loader]:
    """`build.load` without its memory, on sources and with a cache folder of our own."""
    (tmp_path / "csrc").mkdir()
    monkeypatch.setattr(build, "__file__", str(tmp_path / "csrc" / "build.py"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    if not build.compiler():
        pytest.skip("no C++ compiler here")

    def write_and_load(text: str) -> Any:
        (tmp_path / "csrc" / "answer.cpp").write_text(text)
        return build.load.__wrapped__("answer.cpp")

    yield write_and_load


def built(tmp_path: Path) -> list[str]:
    return sorted(p.name for p in (tmp_path / "cache" / "qfuse").iterdir())


def test_build_is_cached_by_content(
    load: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(ANSWER).answer() == 42
    first = built(tmp_path)
    assert len(first) == 1
    assert first[0].startswith("answer-")

    def refuse(*args: object) -> str:
        raise AssertionError("compiled again")

    with monkeypatch.context() as patch:
        patch.setattr(build, "_compile", refuse)
        assert load(ANSWER).answer() == 42
    assert load(ANSWER.replace("42", "43")).answer() == 43
    assert len(built(tmp_path)) == 2
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DQFUSE_OTHER"))
    assert load(ANSWER).answer() == 42
    assert len(built(tmp_path)) == 3


def test_what_is_printed_is_included_and_names_the_library(load: Loader, tmp_path: Path) -> None:
    load("#include QFUSE_PRINTED\n" + ANSWER.replace("42", "printed"))
    for answer in (42, 43):
        printed = f"constexpr int printed = {answer};"
        library: Any = build.load.__wrapped__("answer.cpp", printed=printed)
        assert library.answer() == answer
    assert len(built(tmp_path)) == 2


def test_build_failure_is_a_reason(load: Loader, tmp_path: Path) -> None:
    reason = load("this is no C++;\n")
    assert isinstance(reason, str)
    command = " ".join(build.compiler())
    assert reason.startswith(f"{command} failed on answer.cpp: ")
    assert "error" in reason and "answer.cpp:1" in reason
    assert not (tmp_path / "cache" / "qfuse").exists()


@pytest.mark.parametrize("command", ["/nonexistent/g++", "/nonexistent/ccache g++"])
def test_build_with_a_compiler_that_is_not_there(
    command: str, load: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", command)
    first = command.split()[0]
    assert load(ANSWER) == (
        f"csrc/answer.cpp was not built with {command}: "
        f"[Errno 2] No such file or directory: '{first}'"
    )


def test_build_with_a_compiler_command_of_two_words(
    load: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", f"env {' '.join(build.compiler())}")
    assert load(ANSWER).answer() == 42


def test_build_without_a_compiler(load: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert load(ANSWER) == "no C++ compiler: set CXX or install g++"


@pytest.mark.parametrize("left", [0, 9, 1000, -1])
def test_a_library_that_misses_its_end_is_built_again(
    left: int, load: Loader, tmp_path: Path
) -> None:
    """Loaded, it may end the process with SIGBUS."""
    assert load(ANSWER).answer() == 42
    path = tmp_path / "cache" / "qfuse" / built(tmp_path)[0]
    whole = path.read_bytes()
    path.unlink()  # this process has mapped what lies there
    path.write_bytes(whole[:left])
    assert load(ANSWER).answer() == 42
    assert path.read_bytes() == whole


def test_a_library_that_cannot_be_loaded_is_built_again(load: Loader, tmp_path: Path) -> None:
    """It is whole, and was linked with libraries that are gone."""
    assert load(ANSWER).answer() == 42
    source, other = tmp_path / "other.cpp", tmp_path / "other.so"
    source.write_text("int nowhere();\n" + ANSWER.replace("42", "nowhere()"))
    command = [*build.compiler(), "-shared", "-fPIC", "-Wl,-z,now", "-o", str(other), str(source)]
    subprocess.run(command, check=True)
    text = ANSWER.replace("42", "43")
    path = tmp_path / "csrc" / "answer.cpp"
    path.write_text(text)
    name = build._name(path, build.compiler(), (*build.FLAGS, ""))
    kept.keep(name, other.read_bytes())
    assert load(text).answer() == 43
    assert kept.read(name) != other.read_bytes()


def test_the_compilers_flags_and_the_processor_name_the_library(
    load: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = build.compiler()
    for cxx in (command, [*command, "-DQFUSE_OTHER"]):
        monkeypatch.setenv("CXX", " ".join(cxx))
        assert load(ANSWER).answer() == 42
    assert len(built(tmp_path)) == 2
    digests = set()
    for features in ("Features\t: fp asimd", "Features\t: fp asimd sve bf16", "flags\t: avx2"):
        monkeypatch.setattr(Path, "read_text", lambda _, text=features: f"{text}\n")
        digests.add(build.toolchain(command))
    assert len(digests) == 3


def test_build_where_the_cache_cannot_be_written(
    load: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    """The library serves this process, and that it is not kept is said once."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    warn_once.cache_clear()
    assert load(ANSWER).answer() == 42
    assert load(ANSWER.replace("42", "43")).answer() == 43
    assert told == ["nothing is kept for the next process: Not a directory"]


def test_build_race(load: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four that all found no library: each builds its own, the last rename stays, all work."""
    from threading import Barrier

    assert load(ANSWER).answer() == 42
    for name in built(tmp_path):
        (tmp_path / "cache" / "qfuse" / name).unlink()
    barrier = Barrier(4)
    compile_one = build._compile

    def together(*args: Any) -> None:
        barrier.wait(timeout=300)
        compile_one(*args)

    monkeypatch.setattr(build, "_compile", together)
    with ThreadPoolExecutor(4) as pool:
        libraries: list[Any] = list(pool.map(build.load.__wrapped__, ["answer.cpp"] * 4))
    assert [library.answer() for library in libraries] == [42] * 4
    assert len(built(tmp_path)) == 1


_RANK = """
import os, sys, time
from pathlib import Path
from inductor_q.csrc import build
here = Path(os.environ["SOURCES"])
build.__file__ = str(here / "build.py")
(here / f"ready-{os.environ['RANK']}").touch()
deadline = time.monotonic() + 300
while len(list(here.glob("ready-*"))) < 2 and time.monotonic() < deadline:
    time.sleep(0.001)
assert build.load("answer.cpp").answer() == 42
"""


def test_two_ranks_at_once(load: Loader, tmp_path: Path) -> None:
    (tmp_path / "csrc" / "answer.cpp").write_text(ANSWER)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK],
            env=environment(SOURCES=str(tmp_path / "csrc"), RANK=str(rank)),
        )
        for rank in range(2)
    ]
    assert [rank.wait(400) for rank in ranks] == [0, 0]
    assert len(built(tmp_path)) == 1
