"""`qfuse explain` as a whole: how it ends, what it leaves, and launchers as targets."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from inductor_q.cli import main, parser
from inductor_q.diagnostics import launch
from inductor_q.diagnostics.budgets import Budget
from inductor_q.diagnostics.merge import Ranks
from inductor_q.diagnostics.torchrun import explained_ranks
from tests.support.processes import ROOT, environment

SCRIPT = """
import sys, torch

@torch.compile(backend="eager")
def f(x):
    torch._dynamo.graph_break()
    return x + 1

f(torch.ones(3))
print("ran", sys.argv[1:])
if "fail" in sys.argv:
    raise ValueError("as asked")
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def left() -> tuple[Any, ...]:
    return (
        [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)],
        (list(sys.argv), list(sys.path), sys.modules["__main__"], sys.excepthook, sys.stdout),
        list(sys.meta_path),
        [h for h in logging.getLogger("torch.__trace").handlers if "inductor_q" in repr(h)],
    )


@pytest.mark.parametrize(
    ("options", "args", "status"),
    [
        ([], [], 0),
        (["--max-breaks", "1"], [], 0),
        (["--max-breaks", "0"], [], 1),
        (["--max-breaks", "0"], ["fail"], 1),
    ],
)
def test_in_this_process(
    script: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    options: list[str],
    args: list[str],
    status: int,
) -> None:
    torch._dynamo.reset()
    before, page = left(), tmp_path / "page.html"
    files = ["--json", str(tmp_path / "out.json"), "--html", str(page), "--github"]
    assert main(["explain", *options, *files, script, *args]) == status
    assert left() == before
    said = capfd.readouterr()
    assert said.out == f"ran {args}\n", "the target's output is its own"
    assert "1 graph break" in said.err
    assert "::" in said.err
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["target"] == script
    assert report["argv"] == args
    assert report["exit"]["exception"] == ("ValueError: as asked" if args else "")
    assert "graph break" in page.read_text()


def test_a_target_that_leaves_its_folder(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Reports lie where they were asked for, and the script's lines are still shown."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    with open(script, "a") as file:
        file.write(f"import os\nos.chdir({str(elsewhere)!r})\n")
    torch._dynamo.reset()
    files = ("--json", "out.json", "--html", "pages/page.html", "--dump", "dump")
    assert main(["explain", *files, "script.py"]) == 0
    assert os.listdir(elsewhere) == []
    assert {"out.json", "pages", "dump"} <= {path.name for path in tmp_path.iterdir()}
    assert "torch._dynamo.graph_break()\n    in  your code" in capfd.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--html", "--dump"])
def test_what_cannot_be_written_is_told_before_the_target_runs(
    option: str, script: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path in (file / "below", tmp_path if option != "--dump" else file):
        assert main(["explain", option, str(path), script]) == 2
        said = capfd.readouterr()
        assert said.out == "", "it did not run"
        [line] = said.err.splitlines()
        assert line.startswith(f"qfuse: {option} {path} cannot be written: ")


def test_a_report_that_is_lost_at_the_end_leaves_the_exit_status(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(launch, "write_whole", full)
    torch._dynamo.reset()
    assert main(["explain", "--json", str(tmp_path / "out.json"), script]) == 0
    said = capfd.readouterr()
    assert "out.json was not written: No space left on device" in said.err
    assert "1 graph break" in said.err


@pytest.mark.parametrize(
    ("limit", "problem"),
    [
        (("--min-fused", "90"), "90 is no share"),
        (("--min-fused", "-0.1"), "-0.1 is no share"),
        (("--min-fused", "nan"), "nan is no share"),
        (("--max-breaks", "-1"), "-1 is no number of events"),
        (("--max-recompiles", "many"), "many is no number of events"),
    ],
)
def test_budgets_that_no_run_could_keep(
    limit: tuple[str, str], problem: str, script: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["explain", *limit, script])
    assert stopped.value.code == 2
    said = capfd.readouterr()
    assert said.out == "" and problem in said.err


def test_each_limit_reaches_the_budget() -> None:
    given = ["--max-breaks", "1", "--max-recompiles", "2", "--min-fused", "0.5"]
    options = parser().parse_args(["explain", *given, "--max-saved-mb", "3.5", "script.py"])
    assert launch.Reporter(options, Ranks()).budget == Budget(
        max_breaks=1, max_recompiles=2, min_fused=0.5, max_saved_mb=3.5
    )


def test_mistakes_in_the_call(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "nowhere.py"]) == 2
    assert "cannot run 'nowhere.py': no such file" in capfd.readouterr().err
    assert main(["explain", "--backend", "inductr", "nowhere.py"]) == 2
    assert "did you mean 'inductor'" in capfd.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_sigterm_ends_the_target_after_its_report(tmp_path: Path) -> None:
    script, file = tmp_path / "wait.py", tmp_path / "out.json"
    waiting = "try:\n    time.sleep(60)\nfinally:\n    print('cleaned up')\n"
    script.write_text(f"{SCRIPT}\nimport time\nprint('waiting', flush=True)\n{waiting}")
    process = subprocess.Popen(
        [sys.executable, "-m", "inductor_q", "explain", "--json", str(file), str(script)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ran []\n"
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGTERM
    assert out == "", "without us, SIGTERM leaves no time to clean up either"
    report = json.loads(file.read_text())
    assert (report["exit"]["signal"], len(report["breaks"])) == ("SIGTERM", 1)
    assert "ended by SIGTERM" in err


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_report_is_finished_before_sigterm_ends_a_rank() -> None:
    """torchrun sends it as soon as another rank has failed."""
    look = (
        "import os, signal\n"
        "from inductor_q.diagnostics.launch import _sigterm_later\n"
        "with _sigterm_later():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('reported', flush=True)\n"
        "print('went on')\n"
    )
    command = [sys.executable, "-c", look]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "reported\n"), done.stderr


@pytest.mark.parametrize(
    ("target", "ranks_run"),
    [
        (["s.py", "-m", "x"], ["s.py", "-m", "x"]),
        (["-m", "pkg.train", "--lr", "1"], ["-m", "pkg.train", "--lr", "1"]),
    ],
)
def test_a_launcher_launches_explained_ranks(target: list[str], ranks_run: list[str]) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    given = ["--json", "out.json", "--max-breaks", "0"]
    options = parser().parse_args(["explain", *given, *launcher, *target])
    assert explained_ranks([*launcher, *target], options) == [
        *launcher,
        *("-m", "inductor_q", "explain"),
        *given,
        *ranks_run,
    ]


@pytest.mark.slow
def test_a_pytest_node_sees_nothing_of_ours(tmp_path: Path) -> None:
    """Not even the warning that a package with a plugin was imported before pytest."""
    (tmp_path / "test_it.py").write_text(
        "import torch\n\ndef test_a(capsys):\n    f = torch.compile(torch.sin, backend='eager')\n"
        "    f(torch.ones(2))\n    print('quiet')\n\ndef test_b():\n    assert 0\n"
    )
    pytest_args = ("-q", "-p", "no:cacheprovider", "-W", "error::pytest.PytestWarning")
    for test, status, said in (("test_a", 0, "1 passed"), ("test_b", 1, "1 failed")):
        command = [sys.executable, "-m", "inductor_q", "explain", "--json", f"{test}.json"]
        done = subprocess.run(
            [*command, f"test_it.py::{test}", *pytest_args],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert (done.returncode, said in done.stdout) == (status, True), done.stdout
        assert "warning" not in done.stdout
        report = json.loads((tmp_path / f"{test}.json").read_text())
        assert report["target"] == f"test_it.py::{test}"
        assert report["argv"] == [*pytest_args]
        assert len(report["compiles"]) == (test == "test_a")
