"""Targets run as Python runs them: arguments, paths, `__main__`, output, exit status, errors."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from inductor_q.diagnostics.explanation import Exit
from inductor_q.diagnostics.targets import Target
from inductor_q.exc import InvalidInputs, UnknownTarget


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, source: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    return str(path)


def looked_at() -> tuple[Any, ...]:
    return list(sys.argv), list(sys.path), sys.modules["__main__"], sys.excepthook


@pytest.mark.parametrize(
    ("command", "kind", "name", "args"),
    [
        (["train.py", "--lr", "1"], "script", "train.py", ("--lr", "1")),
        (["-m", "pkg.train", "a"], "module", "pkg.train", ("a",)),
        (["pkg.train:main"], "callable", "pkg.train:main", ()),
        (["tests/test_x.py::test_y", "-q"], "pytest", "tests/test_x.py::test_y", ("-q",)),
    ],
)
def test_kinds(command: list[str], kind: str, name: str, args: tuple[str, ...]) -> None:
    target = Target.parse(command)
    assert (target.kind, target.name, target.args) == (kind, name, args)


def test_a_script_sees_what_python_would_give_it(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(folder / "sub/helper.py", "value = 42")
    script = """
        import pickle, sys, helper
        class Local: pass
        print(sys.argv, __name__, __file__, sys.path[0], helper.value)
        assert sys.modules["__main__"].Local is Local
        pickle.loads(pickle.dumps(Local()))
        """
    write(folder / "sub/script.py", script)
    before = looked_at()
    assert Target.parse(["sub/script.py", "a", "--b"]).run() == Exit(0)
    assert looked_at() == before
    argv = ["sub/script.py", "a", "--b"]
    assert capfd.readouterr().out == f"{argv} __main__ sub/script.py {folder / 'sub'} 42\n"


def test_a_module_sees_what_python_would_give_it(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(folder / "observed_pkg/__init__.py", "")
    body = "import sys; from . import __name__ as up; print(sys.argv[1:], __name__, up)"
    main = write(folder / "observed_pkg/__main__.py", body)
    for name in ("observed_pkg", "observed_pkg.__main__"):
        assert Target.parse(["-m", name, "x"]).run() == Exit(0)
        assert capfd.readouterr().out == "['x'] __main__ observed_pkg\n"
        assert main not in sys.argv


@pytest.mark.parametrize(
    ("source", "status", "err"),
    [
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit(-1)", 255, ""),
        ("import sys; sys.exit('no data')", 1, "no data\n"),
    ],
)
def test_exit_status(
    folder: Path, capfd: pytest.CaptureFixture[str], source: str, status: int, err: str
) -> None:
    ended = Target.parse([write(folder / "leave.py", source)]).run()
    assert (ended.status, capfd.readouterr().err) == (status, err)


def test_an_error_is_printed_as_python_prints_it(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(folder / "wrong.py", "def f():\n    raise ValueError('no')\nf()\n")
    ended = Target.parse([path]).run()
    assert ended == Exit(1, "ValueError: no")
    assert capfd.readouterr().err.splitlines()[:3] == [
        "Traceback (most recent call last):",
        f'  File "{path}", line 3, in <module>',
        "    f()",
    ]


def test_a_syntax_error(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ended = Target.parse([write(folder / "wrong.py", "def f(:\n")]).run()
    assert (ended.status, ended.exception[:12]) == (1, "SyntaxError:")
    assert "targets.py" not in capfd.readouterr().err


def test_the_targets_own_excepthook_is_used(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    hook = "import sys; sys.excepthook = lambda *a: print('mine', a[0].__name__); 1 / 0"
    assert Target.parse([write(folder / "hook.py", hook)]).run().status == 1
    assert capfd.readouterr().out == "mine ZeroDivisionError\n"


def test_threads_are_waited_for(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = """
        import threading, time
        def later():
            time.sleep(0.2)
            print("done")
        threading.Thread(target=later).start()
        print("main over")
        """
    assert Target.parse([write(folder / "threads.py", source)]).run().status == 0
    assert capfd.readouterr().out == "main over\ndone\n"


@pytest.mark.timeout(300)
def test_a_pool_that_is_left_open_is_not_waited_for(folder: Path) -> None:
    source = """
        import concurrent.futures
        pool = concurrent.futures.ThreadPoolExecutor(1)
        assert pool.submit(int, 3).result() == 3
        """
    assert Target.parse([write(folder / "pool.py", source)]).run().status == 0


def test_a_forked_child_does_not_report(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It leaves through our frames; only the parent's end is the target's end."""
    source = """
        import os, sys
        child = os.fork()
        if child == 0:
            print("child", flush=True)
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    ends: list[int] = []
    try:
        Target.parse([write(folder / "fork.py", source)]).run(at_end=lambda: ends.append(1))
    except SystemExit as error:  # in the child: leave as it would, past pytest
        import os

        os._exit(int(str(error.code)))
    assert capfd.readouterr().out == "child\n7\n"
    assert ends == [1]


def test_a_callable_with_inputs(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = """
        class Net:
            def step(self, x, y=0): print("step", x, y)
        net = Net()
        def positional(): return (1,)
        def both(): return (1,), {"y": 2}
        def wrong(): return [1]
        """
    write(folder / "observed_net.py", source)
    for inputs, said in (("positional", "step 1 0\n"), ("both", "step 1 2\n")):
        target = Target.parse(["observed_net:net.step"], inputs=f"observed_net:{inputs}")
        assert target.run() == Exit(0)
        assert capfd.readouterr().out == said
    with pytest.raises(InvalidInputs, match="list"):
        Target.parse(["observed_net:net.step"], inputs="observed_net:wrong").run()
    with pytest.raises(UnknownTarget, match="nothing"):
        Target.parse(["observed_net:net.nothing"]).run()
    with pytest.raises(UnknownTarget, match=r"argument: 'x'; --inputs .*, before the target"):
        Target.parse(["observed_net:net.step", "--inputs", "observed_net:both"]).run()
    with pytest.raises(InvalidInputs, match="that does not fit: too many positional arguments"):
        Target.parse(["observed_net:wrong"], inputs="observed_net:positional").run()


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["nowhere.py"], "no such file"),
        (["-m", "nowhere"], "no module of that name"),
        (["-m"], "no module is named"),
        (["nowhere:main"], "there is no module 'nowhere'"),
    ],
)
def test_what_cannot_be_run(folder: Path, command: list[str], problem: str) -> None:
    with pytest.raises(UnknownTarget, match=problem):
        Target.parse(command).run()


def test_inputs_are_for_a_callable() -> None:
    with pytest.raises(UnknownTarget, match="--inputs"):
        Target.parse(["train.py"], inputs="m:f")
